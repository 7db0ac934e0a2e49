"""Named problems (`Case`), and the tensors drawn for them (`Inputs`); public through `tilewise.testing`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewise import masks
from tilewise.problem import DTYPES
from tilewise.spec import DIFFERENTIABLE


@dataclass(frozen=True, repr=False)
class Case:
    """One named problem: plain values only, so that its repr rebuilds it. Inputs are drawn by `make_inputs`.

    Args:
        name: how tests show it.
        B, Sq, Sk, H, Hkv, D, Dv: sizes; None means like q (Sk = Sq, Hkv = H, Dv = D).
        lengths_q, lengths_k: lengths of packed sequences: the call becomes `attention_varlen`, and B, Sq, Sk are ignored.
        used_q, used_k: seqused of each packed sequence.
        spare: rows and keys behind the last packed sequence, which belong to none.
        mask: recipes joined by ``&``: ("causal", align), ("window", left, right, align), ("chunk", size),
            ("prefix", length or "B"), ("document", "S" or "BS", packed), ("blocks", block_m, block_n, dims, density) and
            ("dense", dims, density). Trailing entries have defaults.
        softcap, softmax_scale, dropout: as in `attention`.
        alibi: dims of the slopes, "H" or "BH".
        bias: its dims: any of B, H, Q, K or 1 for broadcast, as "BHQK", "1HQK", "11Q1", "K" or "" for a scalar tensor.
        sinks: whether there are sinks.
        dtypes: dtypes to run in.
        strides: "contiguous", "transposed" (made as (B, H, S, D)), "sliced" (parts of a larger buffer), "expanded" (one
            kv head and one sequence of memory for all) or "reversed" (head dim not the innermost in memory).
        magnitude: factor on q and k: logits grow with its square.
        offset: added to every element of q and k.
        poison: NaN where no result may depend on it: keys that no row sees, rows that see no key and their do.
        needs: the tensors that require grad; default all there are.
    """

    name: str = ""
    B: int = 2
    Sq: int = 33
    Sk: int | None = None
    H: int = 2
    Hkv: int | None = None
    D: int = 16
    Dv: int | None = None
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    spare: int = 0
    mask: tuple[tuple, ...] = ()
    softcap: float | None = None
    softmax_scale: float | None = None
    alibi: str | None = None
    bias: str | None = None
    sinks: bool = False
    dropout: float = 0.0
    dtypes: tuple[torch.dtype, ...] = DTYPES
    strides: str = "contiguous"
    magnitude: float = 1.0
    offset: float = 0.0
    poison: bool = False
    needs: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        parts = [f.name + "=" + repr(getattr(self, f.name)) for f in dataclasses.fields(self) if self._differs(f)]
        return f"Case({', '.join(parts)})"

    def _differs(self, f: dataclasses.Field) -> bool:
        return getattr(self, f.name) != f.default

    def sizes(self) -> dict[str, int]:
        """The sizes with defaults filled in; lengths are the longest ones of packed sequences."""
        B, Sq, Sk = self.B, self.Sq, self.Sq if self.Sk is None else self.Sk
        if self.lengths_q is not None:
            lengths_k = self.lengths_q if self.lengths_k is None else self.lengths_k
            B, Sq, Sk = len(self.lengths_q), max(self.lengths_q, default=0), max(lengths_k, default=0)
        Hkv, Dv = self.H if self.Hkv is None else self.Hkv, self.D if self.Dv is None else self.Dv
        return {"B": B, "Sq": Sq, "Sk": Sk, "H": self.H, "Hkv": Hkv, "D": self.D, "Dv": Dv}


@dataclass(frozen=True, eq=False)
class Inputs:
    """One call with its tensors, and the gradients that flow into its outputs.

    Args:
        q, k, v: as in `attention`, or packed when `options` holds cu_seqlens_q.
        options: keyword arguments of `attention` or `attention_varlen`.
        do, dlse: gradients of o and lse; drawn from `seed` when None.
        seed: of the dropout mask, and of do and dlse.
        needs: names of q, k, v, bias, alibi_slopes, sinks that require grad; default all there are.
        repro: what a failure shows as the way to run it again.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    do: Tensor | None = None
    dlse: Tensor | None = None
    seed: int = 0
    needs: Sequence[str] | None = None
    repro: str = "(inputs given as tensors)"

    @property
    def varlen(self) -> bool:
        return "cu_seqlens_q" in self.options

    def tensors(self) -> dict[str, Tensor]:
        """q, k, v and those of bias, alibi_slopes, sinks that the call has."""
        found = {"q": self.q, "k": self.k, "v": self.v}
        return found | {name: self.options[name] for name in DIFFERENTIABLE if self.options.get(name) is not None}

    def upstream(self) -> tuple[Tensor, Tensor]:
        """do and dlse."""
        acc = torch.float64 if self.q.dtype == torch.float64 else torch.float32
        g = torch.Generator().manual_seed(self.seed + 1)
        do, dlse = self.do, self.dlse
        if do is None:
            do = torch.randn(*self.q.shape[:-1], self.v.shape[-1], generator=g, dtype=acc).to(self.q)
        if dlse is None:
            rows = self.q.shape[:-1].numel() // self.q.shape[-2]
            shape = (self.q.shape[1], rows) if self.varlen else (self.q.shape[0], self.q.shape[2], self.q.shape[1])
            dlse = torch.randn(shape, generator=g, dtype=acc).to(self.q.device)
        return do, dlse

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same call with every floating-point tensor in `dtype`."""
        cast = {name: t.to(dtype) for name, t in self.tensors().items()}
        do, dlse = (t.to(dtype) for t in self.upstream())
        q, k, v = (cast.pop(name) for name in ("q", "k", "v"))
        return dataclasses.replace(self, q=q, k=k, v=v, options=self.options | cast, do=do, dlse=dlse)

    def on(self, device: str) -> Inputs:
        """The same call with every tensor on a device, strides and all."""
        if self.q.device.type == device:
            return self
        moved: dict[str, Any] = {name: _moved(t, device) for name, t in self.options.items() if isinstance(t, Tensor)}
        if isinstance(mask := self.options.get("mask"), masks.Mask):
            parts = [m.rebuild(m.params, [_moved(t, device) for t in m.tensors]) for m in mask.parts()]
            moved["mask"] = masks.And(tuple(parts))
        q, k, v = (_moved(t, device) for t in (self.q, self.k, self.v))
        do, dlse = (None if t is None else _moved(t, device) for t in (self.do, self.dlse))
        return dataclasses.replace(self, q=q, k=k, v=v, options=self.options | moved, do=do, dlse=dlse)


def _moved(t: Tensor, device: str) -> Tensor:
    storage = t.untyped_storage().to(device=device)
    moved = torch.empty(0, dtype=t.dtype, device=device).set_(storage, t.storage_offset(), t.size(), t.stride())
    return moved.neg() if t.is_neg() else moved


def draw(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu") -> Inputs:
    """The tensors of a case, but for its poison: the same case, dtype and seed give the same tensors on every machine.

    Args:
        case: the problem.
        dtype: of q, k, v and bias; slopes and sinks are float32 (float64 for float64).
        seed: of everything random, dropout included.
        device: where the tensors go.
    """
    g = torch.Generator().manual_seed(seed)
    n = case.sizes()
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    draw = _Draw(g, n, device)
    options: dict[str, Any] = {}
    if case.lengths_q is None:
        shapes = [(n["B"], n["Sq"], n["H"], n["D"])] + [(n["B"], n["Sk"], n["Hkv"], d) for d in (n["D"], n["Dv"])]
    else:
        lengths_k = case.lengths_q if case.lengths_k is None else case.lengths_k
        total_q, total_k = sum(case.lengths_q) + case.spare, sum(lengths_k) + case.spare
        shapes = [(total_q, n["H"], n["D"])] + [(total_k, n["Hkv"], d) for d in (n["D"], n["Dv"])]
        options |= {"cu_seqlens_q": _cumulative(case.lengths_q, device), "cu_seqlens_k": _cumulative(lengths_k, device)}
        for name, used in (("seqused_q", case.used_q), ("seqused_k", case.used_k)):
            if used is not None:
                options[name] = torch.tensor(used, dtype=torch.int32, device=device)
    factors = ((case.magnitude, case.offset), (case.magnitude, case.offset), (1.0, 0.0))
    q, k, v = (
        _strided((draw.normal(shape) * scale + shift).to(device, dtype), case.strides)
        for shape, (scale, shift) in zip(shapes, factors, strict=True)
    )
    if case.mask:
        options["mask"] = draw.mask(case.mask[0])
        for recipe in case.mask[1:]:
            options["mask"] = options["mask"] & draw.mask(recipe)
    if case.bias is not None:
        options["bias"] = draw.normal(draw.shape(case.bias)).to(device, dtype)
    if case.alibi is not None:
        options["alibi_slopes"] = draw.normal(draw.shape(case.alibi)).abs().mul(0.2).to(device, acc)
    if case.sinks:
        options["sinks"] = draw.normal((n["H"],)).to(device, acc)
    plain = {"softcap": case.softcap, "softmax_scale": case.softmax_scale, "dropout_p": case.dropout or None}
    options |= {name: value for name, value in plain.items() if value is not None}
    repro = f"assert_matches_reference({case!r}, {dtype}, seed={seed}"
    return Inputs(q, k, v, options, seed=seed, needs=case.needs, repro=repro)


@dataclass(frozen=True)
class _Draw:
    """Random tensors and masks of one case."""

    g: torch.Generator
    n: dict[str, int]
    device: str

    def normal(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self.g, dtype=torch.float64)

    def integers(self, high: int, shape: Sequence[int]) -> Tensor:
        return torch.randint(0, high, tuple(shape), generator=self.g)

    def shape(self, dims: str) -> list[int]:
        sizes = {"B": self.n["B"], "H": self.n["H"], "Q": self.n["Sq"], "K": self.n["Sk"], "1": 1}
        return [sizes[d] for d in dims]

    def mask(self, recipe: Sequence[Any]) -> masks.Mask:
        kind, *args = recipe
        mask = getattr(self, f"_{kind}")(*args)
        return mask.rebuild(mask.params, [t.to(self.device) for t in mask.tensors])

    def _causal(self, align: str | None = None) -> masks.Mask:
        return masks.Causal(align)

    def _window(self, left: int | None, right: int | None, align: str | None = None) -> masks.Mask:
        return masks.Window(left, right, align)

    def _chunk(self, size: int) -> masks.Mask:
        return masks.Chunk(size)

    def _prefix(self, length: int | str) -> masks.Mask:
        return masks.Prefix(self.integers(self.n["Sk"] + 2, (self.n["B"],)) if isinstance(length, str) else length)

    def _document(self, dims: str = "S", packed: bool = False) -> masks.Mask:
        """Runs of keys in shuffled order of id, queries anywhere; id -1 is padding, and some ids have no keys.

        If `packed`: one document after the other, and padding at the end.
        """
        batch = self.n["B"] if dims == "BS" else 1
        if packed:
            ids = [self.integers(6, (batch, self.n[side])).sort(1).values for side in ("Sq", "Sk")]
            ids = [torch.where(x == 5, -1, x) for x in ids]
            return masks.Document(*ids) if dims == "BS" else masks.Document(*(x[0] for x in ids))
        runs = self.integers(4, (batch, self.n["Sk"])).sort(1).values
        names = torch.stack([torch.randperm(5, generator=self.g) for _ in range(max(batch, 1))])[:batch] - 1
        ids_k = names.gather(1, runs)
        ids_q = self.integers(5, (batch, self.n["Sq"])) - 1
        return masks.Document(ids_q, ids_k) if dims == "BS" else masks.Document(ids_q[0], ids_k[0])

    def _blocks(self, block_m: int, block_n: int, dims: str = "QK", density: float = 0.5) -> masks.Mask:
        tiles = {"Q": -(-self.n["Sq"] // block_m), "K": -(-self.n["Sk"] // block_n)}
        shape = [tiles.get(d, size) for d, size in zip(dims, self.shape(dims), strict=True)]
        return masks.Blocks(torch.rand(shape, generator=self.g) < density, block_m, block_n)

    def _dense(self, dims: str = "BHQK", density: float = 0.5) -> masks.Mask:
        return masks.Dense(torch.rand(self.shape(dims), generator=self.g) < density)


def _cumulative(lengths: Sequence[int], device: str) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64, device=device).cumsum(0).int()


def _strided(t: Tensor, strides: str) -> Tensor:
    """The same shape (and, but for "expanded", the same values) with other strides."""
    if strides == "transposed":
        return t.transpose(-3, -2).contiguous().transpose(-3, -2)
    if strides == "sliced":
        wide = t.new_full((*t.shape[:-2], t.shape[-2] + 1, t.shape[-1] + 3), torch.nan)
        wide[..., 1:, 1:-2] = t
        return wide[..., 1:, 1:-2]
    if strides == "reversed":
        return t.permute(*range(t.dim())[::-1]).contiguous().permute(*range(t.dim())[::-1])
    if strides == "expanded":
        one = t[:, :1] if t.dim() == 3 else t[:1, :, :1]
        return one.expand(t.shape)
    if strides != "contiguous":
        raise ValueError(f"unknown strides {strides!r}")
    return t
