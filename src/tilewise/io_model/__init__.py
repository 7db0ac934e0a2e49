"""The IO model as a tool: what attention algorithms move and compute, on which GPU that takes how long, and what fits.

`traffic` (one layer below) has the counts; here are the systems of the papers with their tile sizes (`systems`), a simulator
that executes them with a counted memory (`simulator`), their laws (`laws`), GPUs and models as data (`gpus`, `models`), the
roofline (`roofline`), the memory of a training step (`fit`) and hardware counters (`counters`).
"""
