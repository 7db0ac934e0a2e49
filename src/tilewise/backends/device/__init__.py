"""What Triton and Gluon kernels share: structs, masks, modifiers, softmax. It combines tensors and never creates layouts."""
