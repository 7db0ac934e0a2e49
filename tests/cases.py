"""The one list of cases that every backend runs, forward and backward, in every dtype of each case.

Not a grid: each case is there for what its name says. Its docstring is the `Case` itself; `tilewise.testing` draws it.
"""

import torch

from tilewise.testing import Case

FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
CAUSAL = ("causal",)
TOP_LEFT = ("causal", "top_left")


def _head_dims() -> list[Case]:
    dims = (1, 3, 8, 16, 24, 40, 59, 64, 72, 80, 96, 111, 112, 128, 160, 192, 224, 256, 512)
    return [Case(f"d{d}", B=1, Sq=37, Sk=41, D=d, mask=(CAUSAL,)) for d in dims]


SIZES = [
    Case("plain", Sq=64, Sk=64, D=64),
    Case("odd_lengths", Sq=131, Sk=77, H=3, D=40),
    Case("many_tiles", B=1, Sq=300, Sk=517, H=2, D=64, mask=(CAUSAL,)),
    Case("one_query", Sq=1, Sk=129, H=4, Hkv=2, D=64),
    Case("one_query_causal", Sq=1, Sk=97, D=32, mask=(CAUSAL,)),
    Case("one_key", Sq=70, Sk=1, D=32),
    Case("one_by_one", B=1, Sq=1, Sk=1, H=1, D=1),
    Case("few_queries", Sq=5, Sk=260, H=6, Hkv=2, D=64, mask=(CAUSAL,)),
    Case("more_heads_than_work", B=1, Sq=3, Sk=3, H=84, D=64),
    Case("batch_of_none", B=0, Sq=8, Sk=8),
    Case("batch_of_none_documents", B=0, Sq=8, Sk=8, mask=(("document", "BS"),)),
    Case("no_queries", Sq=0, Sk=8, mask=(CAUSAL,)),
    Case("no_queries_bias", Sq=0, Sk=1, bias="HQK"),
    Case("no_keys", Sq=8, Sk=0),
    Case("no_keys_sink", Sq=8, Sk=0, sinks=True, mask=(CAUSAL,)),
    Case("gqa3_short", Sq=5, H=9, Hkv=3, D=64, mask=(CAUSAL,)),
    Case("gqa4", Sq=67, Sk=130, H=8, Hkv=2, D=48, mask=(CAUSAL,)),
    Case("mqa8", B=1, Sq=70, H=8, Hkv=1, D=64, mask=(("window", 20, 0),)),
    Case("d_ne_dv", Sq=45, Sk=70, H=4, Hkv=2, D=192, Dv=128, mask=(CAUSAL,)),
    Case("dv_larger", Sq=33, Sk=40, D=5, Dv=67),
    Case("dv_is_one", Sq=33, Sk=40, D=64, Dv=1, sinks=True),
    Case("latent", B=1, Sq=20, Sk=53, H=4, Hkv=1, D=576, Dv=512, mask=(CAUSAL,)),
    *_head_dims(),
]

STRIDES = [
    Case("transposed", Sq=70, Sk=66, H=4, Hkv=2, D=32, strides="transposed", mask=(CAUSAL,)),
    Case("sliced", Sq=70, Sk=66, H=4, Hkv=2, D=33, strides="sliced"),
    Case("expanded", Sq=40, Sk=50, H=4, D=32, strides="expanded", mask=(CAUSAL,)),
    Case("reversed", Sq=40, Sk=50, H=4, Hkv=1, D=32, strides="reversed", bias="BHQK"),
    Case("sliced_varlen", lengths_q=(30, 7, 0, 41), H=4, Hkv=2, D=20, spare=3, strides="sliced", mask=(CAUSAL,)),
]

MASKS = [
    Case("causal_top_left", Sq=40, Sk=90, mask=(TOP_LEFT,)),
    Case("causal_rows_without_keys", Sq=150, Sk=67, mask=(CAUSAL,), poison=True),
    Case("causal_top_left_unseen_keys", Sq=67, Sk=150, mask=(TOP_LEFT,), poison=True),
    Case("window", Sq=130, mask=(("window", 17, 9),)),
    Case("window_of_one", Sq=70, mask=(("window", 0, 0),)),
    Case("window_left_only", Sq=70, Sk=130, mask=(("window", 30, None),)),
    Case("window_right_only_top_left", Sq=70, Sk=130, mask=(("window", None, 5, "top_left"),)),
    Case("window_wider_than_keys", Sq=64, Sk=16, mask=(("window", 3, 10**6),), poison=True),
    Case("window_wide_left", Sq=64, Sk=16, mask=(("window", 10**6, 3),), poison=True),
    Case("prefix", Sq=75, Sk=90, mask=(("prefix", 31),)),
    Case("prefix_per_sequence", B=3, Sq=75, mask=(("prefix", "B"),)),
    Case("chunk_causal", Sq=100, Sk=115, mask=(("chunk", 24), CAUSAL)),
    Case("chunk_negative_positions", Sq=90, Sk=40, mask=(("chunk", 7),), poison=True),
    Case("document", Sq=100, mask=(("document",),), poison=True),
    Case("document_per_sequence", B=3, Sq=90, Sk=77, H=4, Hkv=2, mask=(("document", "BS"), CAUSAL), poison=True),
    Case("document_window_prefix", B=2, Sq=90, mask=(("document", "BS"), ("window", 20, 20), ("prefix", 40))),
    Case("document_tiles", B=2, Sq=410, H=4, Hkv=2, D=64, mask=(("document", "BS"), CAUSAL), poison=True),
    Case("document_packed", B=2, Sq=410, H=4, Hkv=2, D=64, mask=(("document", "BS", True), CAUSAL), poison=True),
    Case("document_packed_d128", B=2, Sq=300, Sk=390, H=2, D=128, sinks=True,
         mask=(("document", "BS", True), ("window", 90, 30))),
    Case("document_packed_d256", B=2, Sq=270, H=2, D=256, mask=(("document", "S", True),), poison=True),
    Case("blocks", B=1, Sq=200, Sk=230, mask=(("blocks", 32, 64),), poison=True),
    Case("blocks_per_head", Sq=100, Sk=130, H=4, Hkv=2, mask=(("blocks", 16, 48, "BHQK", 0.4),), poison=True),
    Case("blocks_two_sizes_causal", B=1, Sq=150, mask=(("blocks", 24, 40, "HQK"), ("blocks", 16, 16, "QK"), CAUSAL)),
    Case("blocks_tiles", B=2, Sq=420, Sk=500, H=4, Hkv=2, D=64, mask=(("blocks", 128, 128, "HQK", 0.4),), poison=True),
    Case("blocks_tiles_causal_d128", B=1, Sq=500, H=4, Hkv=2, D=128, mask=(("blocks", 64, 64, "HQK"), CAUSAL), poison=True),
    Case("blocks_tiles_document_d256", B=2, Sq=330, H=2, D=256, softcap=4.0,
         mask=(("blocks", 64, 64, "BHQK", 0.6), ("document", "BS", True), CAUSAL)),
    Case("blocks_tiles_rows", B=1, Sq=300, H=2, D=64, alibi="H", mask=(("blocks", 24, 64, "QK", 0.5),), poison=True),
    Case("blocks_none_kept", B=1, Sq=70, mask=(("blocks", 32, 32, "QK", 0.0),), poison=True),
    Case("dense", Sq=90, Sk=75, mask=(("dense", "BHQK", 0.5),)),
    Case("dense_sparse", Sq=70, Sk=200, mask=(("dense", "11QK", 0.02),), poison=True),
    Case("dense_key_padding", B=3, Sq=50, Sk=150, H=4, Hkv=1, mask=(("dense", "B11K", 0.6), CAUSAL), poison=True),
    Case("dense_row_mask", Sq=50, Sk=60, mask=(("dense", "Q1", 0.5),), poison=True),
    Case("dense_nothing_seen", Sq=40, Sk=60, mask=(("dense", "QK", 0.0),), poison=True),
    Case("dense_blocks_window", B=1, Sq=140, mask=(("dense", "HQK", 0.7), ("blocks", 32, 16), ("window", 60, 10))),
    Case("all_masks", Sq=110, Sk=120, H=4, Hkv=2, poison=True, mask=(
        ("document", "BS"), ("prefix", "B"), ("window", 70, 60), ("chunk", 64), ("blocks", 16, 32, "HQK", 0.8),
        ("dense", "B11K", 0.9),
    )),
]  # fmt: skip

MODIFIERS = [
    Case("softcap", Sq=70, D=32, softcap=2.0, magnitude=2.0),
    Case("d192_128_causal", Sq=300, Sk=330, H=4, Hkv=2, D=192, Dv=128, mask=(CAUSAL,)),
    Case("softcap_saturated_large", B=1, Sq=30, Sk=40, D=32, softcap=50.0, softmax_scale=60.0),
    Case("softcap_saturated", Sq=40, D=32, softcap=1.0, magnitude=4.0, mask=(CAUSAL,)),
    Case("softcap_unseen_keys", Sq=70, Sk=90, D=32, H=4, Hkv=2, softcap=4.0, poison=True,
         mask=(("document", "BS"), CAUSAL)),
    Case("scale", Sq=40, softmax_scale=0.7, mask=(CAUSAL,)),
    Case("scale_negative", Sq=40, softmax_scale=-0.3),
    Case("scale_zero", Sq=40, softmax_scale=0.0, mask=(CAUSAL,)),
    Case("alibi", Sq=60, Sk=75, H=5, alibi="H", mask=(CAUSAL,)),
    Case("alibi_per_sequence", B=3, Sq=75, Sk=60, H=4, Hkv=2, alibi="BH"),
    Case("alibi_top_left", Sq=60, Sk=75, H=40, D=8, alibi="H", mask=(TOP_LEFT,)),
    Case("bias_full", Sq=43, Sk=77, H=4, Hkv=2, bias="BHQK", mask=(CAUSAL,)),
    Case("bias_per_head", Sq=43, Sk=77, bias="1HQK"),
    Case("bias_shared", Sq=43, Sk=77, bias="QK", mask=(("window", 9, 30),)),
    Case("bias_per_key", B=3, Sq=43, Sk=77, bias="B11K"),
    Case("bias_per_row", Sq=43, Sk=77, bias="H Q1".replace(" ", "")),
    Case("bias_scalar", Sq=43, Sk=77, bias="", sinks=True),
    Case("bias_d256", B=1, Sq=150, Sk=200, H=4, Hkv=2, D=256, bias="HQK", mask=(CAUSAL,)),
    Case("bias_ones", Sq=20, Sk=30, bias="1111", sinks=True),
    Case("sinks", Sq=70, Sk=50, H=4, Hkv=2, sinks=True, mask=(CAUSAL,)),
    Case("sinks_rows_without_keys", Sq=70, Sk=50, H=4, Hkv=2, sinks=True, poison=True, mask=(CAUSAL, ("dense", "Q1", 0.7))),
    Case("dropout", Sq=70, Sk=90, H=4, Hkv=2, dropout=0.3, mask=(CAUSAL,)),
    Case("dropout_most", B=1, Sq=70, Sk=90, dropout=0.95),
    Case("mix_local", Sq=80, Sk=95, H=6, Hkv=2, D=24, mask=(("window", 30, 0),), softcap=5.0, sinks=True, alibi="H"),
    Case("mix_everything", Sq=65, Sk=80, H=4, Hkv=2, D=20, Dv=36, softcap=4.0, alibi="BH", bias="BHQK", sinks=True,
         dropout=0.2, strides="transposed", mask=(("document", "BS"), ("window", 50, 40))),
    Case("mix_blocks", Sq=90, Sk=100, H=4, Hkv=4, softcap=4.0, bias="HQK", sinks=True, dropout=0.1,
         mask=(("blocks", 16, 32, "BHQK", 0.6), CAUSAL)),
]  # fmt: skip

VARLEN = [
    Case("varlen", lengths_q=(17, 64, 1, 130), D=32),
    Case("varlen_causal_gqa", lengths_q=(40, 3, 77), lengths_k=(50, 20, 77), H=6, Hkv=2, D=32, mask=(CAUSAL,)),
    Case("varlen_empty_sequences", lengths_q=(0, 0, 12, 8, 0), lengths_k=(0, 25, 17, 0, 9), H=2, D=32, spare=4,
         mask=(CAUSAL,), poison=True),
    Case("varlen_one_query_each", lengths_q=(0, 1, 0, 1), lengths_k=(0, 3, 0, 5), H=9, Hkv=3, D=16),
    Case("varlen_no_sequences", lengths_q=(), spare=5, poison=True),
    Case("varlen_top_left", lengths_q=(30, 20), lengths_k=(20, 45), mask=(TOP_LEFT,)),
    Case("varlen_seqused", lengths_q=(30, 20, 25), lengths_k=(40, 45, 30), used_q=(30, 7, 0), used_k=(3, 45, 8), H=4,
         Hkv=2, spare=2, mask=(CAUSAL,), poison=True),
    Case("varlen_masks", lengths_q=(60, 35), lengths_k=(70, 30), poison=True,
         mask=(("window", 25, 9), ("chunk", 32), ("prefix", "B"), ("dense", "BHQK", 0.7))),
    Case("varlen_blocks", lengths_q=(60, 35), lengths_k=(70, 30), H=4, mask=(("blocks", 16, 16, "HQK", 0.6),)),
    Case("varlen_blocks_tiles", lengths_q=(260, 0, 135), lengths_k=(270, 40, 130), H=4, Hkv=2, D=64, spare=3, poison=True,
         mask=(("blocks", 64, 128, "HQK", 0.6), ("prefix", "B"))),
    Case("varlen_mix", lengths_q=(33, 0, 50), lengths_k=(40, 4, 50), H=4, Hkv=2, D=24, Dv=8, spare=1, softcap=3.0,
         alibi="BH", bias="BHQK", sinks=True, dropout=0.25, mask=(CAUSAL,)),
    Case("varlen_mix_seqused", lengths_q=(33, 20), lengths_k=(40, 24), used_k=(20, 0), H=4, Hkv=1, sinks=True,
         alibi="H", bias="11QK", mask=(("window", 20, 20),)),
]  # fmt: skip

EXTREMES = [
    Case("logits_1e3", Sq=50, D=64, magnitude=16.0, mask=(CAUSAL,)),
    Case("logits_all_very_negative", Sq=40, D=128, offset=0.0, magnitude=1.0, softmax_scale=-1e5, dtypes=(FP32, FP64)),
    Case("constant_1000", B=1, Sq=24, D=64, magnitude=0.0, offset=1000.0, dtypes=(FP32, FP64, BF16, FP16)),
    Case("magnitude_5", B=1, Sq=128, D=64, magnitude=5.0, mask=(CAUSAL,), dtypes=(FP16, BF16, FP32)),
    # Rows see one key, with weight 1 exactly, beside NaN that they must not see.
    Case("one_key_each", Sq=40, Sk=50, D=48, magnitude=3.0, softmax_scale=0.3, mask=(("window", 0, 0),), poison=True),
    Case("one_key_each_softcap", Sq=60, Sk=70, H=4, D=64, magnitude=3.0, softcap=1e4, mask=(("window", 0, 0),), poison=True),
    Case("tiny_inputs", Sq=40, magnitude=1e-18, mask=(CAUSAL,), dtypes=(FP32, FP64, BF16)),
]  # fmt: skip

NEEDS = [
    Case("needs_q", Sq=40, needs=("q",), H=4, Hkv=2, sinks=True, alibi="H", bias="BHQK"),
    Case("needs_k_bias", Sq=40, needs=("k", "bias"), H=4, Hkv=2, sinks=True, alibi="H", bias="1HQK"),
    Case("needs_v_sinks", Sq=40, needs=("v", "sinks"), H=4, Hkv=2, sinks=True, alibi="H", bias="BHQK"),
    Case("needs_slopes", Sq=40, needs=("alibi_slopes",), H=4, Hkv=2, sinks=True, alibi="BH", mask=(CAUSAL,)),
    Case("needs_none", Sq=40, needs=(), sinks=True, bias="BHQK"),
]

#: Few rows over many keys, for kernels that divide the keys and pack the heads of a group into one tile.
DECODE = [
    Case("decode_one_query", Sq=1, Sk=400, H=8, Hkv=2, D=64),
    Case("decode_causal", Sq=4, Sk=333, H=6, Hkv=2, D=40, mask=(CAUSAL,), poison=True),
    Case("decode_mqa", B=1, Sq=3, Sk=260, H=20, Hkv=1, D=32, mask=(CAUSAL,)),
    Case("decode_two_tiles", B=1, Sq=24, Sk=800, H=8, Hkv=2, D=32, mask=(CAUSAL,), poison=True),
    Case("decode_top_left", Sq=9, Sk=300, D=32, mask=(TOP_LEFT,), poison=True),
    Case("decode_window", Sq=2, Sk=500, H=4, Hkv=2, D=32, mask=(("window", 70, 0),), poison=True),
    Case("decode_chunk", Sq=5, Sk=310, H=4, Hkv=2, D=32, mask=(("chunk", 64), ("prefix", 290)), poison=True),
    Case("decode_document", Sq=4, Sk=300, H=4, Hkv=2, D=32, mask=(("document", "BS"), CAUSAL), poison=True),
    Case("decode_prefix_per_sequence", B=3, Sq=4, Sk=250, H=4, Hkv=2, D=32, mask=(("prefix", "B"),)),
    Case("decode_blocks", Sq=3, Sk=300, H=6, Hkv=2, D=32, mask=(("blocks", 16, 32, "HQK", 0.4),), poison=True),
    Case("decode_blocks_rows", Sq=20, Sk=300, H=3, Hkv=1, D=16, mask=(("blocks", 2, 16, "BHQK", 0.3), CAUSAL), poison=True),
    Case("decode_dense", Sq=3, Sk=300, H=4, Hkv=2, D=32, mask=(("dense", "BHQK", 0.3),), poison=True),
    Case("decode_nothing_seen", Sq=3, Sk=300, H=4, Hkv=2, D=32, mask=(("dense", "B11K", 0.0),), poison=True),
    Case("decode_rows_without_keys", Sq=12, Sk=5, H=4, Hkv=2, D=32, sinks=True, mask=(CAUSAL,), poison=True),
    Case("decode_softcap", Sq=2, Sk=300, H=4, Hkv=2, D=32, softcap=2.0, magnitude=2.0),
    Case("decode_alibi", Sq=3, Sk=300, H=6, Hkv=2, D=32, alibi="BH", mask=(CAUSAL,)),
    Case("decode_bias", Sq=3, Sk=300, H=6, Hkv=2, D=32, bias="BHQK"),
    Case("decode_bias_per_head", Sq=3, Sk=300, H=6, Hkv=2, D=32, bias="H1K"),
    Case("decode_sinks", Sq=3, Sk=300, H=6, Hkv=2, D=32, sinks=True),
    Case("decode_dropout", Sq=3, Sk=300, H=6, Hkv=2, D=32, dropout=0.3),
    Case("decode_one_key_each", Sq=8, Sk=50, H=8, D=48, magnitude=3.0, softmax_scale=0.3, mask=(("window", 0, 0),),
         poison=True),
    Case("decode_logits_1e3", Sq=2, Sk=300, H=4, Hkv=2, D=64, magnitude=16.0),
    Case("decode_mix", Sq=3, Sk=210, H=6, Hkv=2, D=24, Dv=40, softcap=4.0, alibi="BH", bias="BHQK", sinks=True,
         dropout=0.2, strides="transposed", mask=(("document", "BS"), ("window", 150, 10))),
    Case("decode_d_ne_dv", Sq=1, Sk=200, H=4, Hkv=1, D=192, Dv=128, mask=(CAUSAL,)),
    Case("decode_varlen", lengths_q=(1, 0, 3, 2), lengths_k=(300, 20, 0, 77), H=6, Hkv=2, D=32, spare=2, sinks=True,
         mask=(CAUSAL,), poison=True),
    Case("decode_varlen_seqused", lengths_q=(1, 1, 2), lengths_k=(300, 45, 130), used_k=(290, 0, 64), H=4, Hkv=2, D=32,
         spare=2, mask=(CAUSAL,), poison=True),
    Case("decode_varlen_mix", lengths_q=(2, 1, 4), lengths_k=(150, 4, 310), H=4, Hkv=1, D=24, Dv=8, softcap=3.0, alibi="BH",
         bias="BHQK", sinks=True, dropout=0.25, mask=(("window", 200, 0), ("dense", "B11K", 0.9))),
]  # fmt: skip

CASES: list[Case] = [*SIZES, *STRIDES, *MASKS, *MODIFIERS, *VARLEN, *EXTREMES, *NEEDS, *DECODE]
