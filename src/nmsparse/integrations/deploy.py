"""What to tell TensorRT and onnxruntime so that an exported ONNX file runs on sparse tensor cores, flag by flag.

    print(trtexec("model.onnx").explain())
    session = onnxruntime.InferenceSession("model.onnx", providers=onnxruntime_providers("model.onnx").providers)

Both find 2:4 weights by looking at them; the flag only allows sparse algorithms, and each is taken only where it times faster.
The flags are those of the vendors' documentation (TensorRT 10 and 11, onnxruntime 1.22 and later; 1.23 for bf16). They were not
run here: that takes an NVIDIA GPU with TensorRT.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

Precision = Literal["fp32", "fp16", "bf16"]
Shapes = Mapping[str, Sequence[int]]
"""Of inputs, by name."""
BATCHES = (1, 8, 32)
"""Smallest, usual and largest size of the batch, unless others are given."""


@dataclass(frozen=True)
class Command:
    """A command line, and what each of its flags is for."""

    program: str
    flags: dict[str, str]
    """Flag to reason, in order."""

    @property
    def arguments(self) -> list[str]:
        """For ``subprocess.run``."""
        return [self.program, *self.flags]

    @property
    def shell(self) -> str:
        """For a shell, quoted, one flag per line."""
        return " \\\n    ".join(shlex.quote(argument) for argument in self.arguments)

    def explain(self) -> str:
        return "\n".join([self.shell, "", *(f"{flag}\n    {why}" for flag, why in self.flags.items())])


@dataclass(frozen=True)
class Providers:
    """Execution providers of an onnxruntime session, and what each option is for."""

    options: dict[str, Any]
    reasons: dict[str, str]
    fallbacks: tuple[str, ...] = ("CUDAExecutionProvider", "CPUExecutionProvider")
    """Take over what TensorRT does not support."""

    @property
    def providers(self) -> list[Any]:
        """The ``providers`` argument of ``onnxruntime.InferenceSession``."""
        return [("TensorrtExecutionProvider", dict(self.options)), *self.fallbacks]

    def explain(self) -> str:
        lines = [f"{name} = {value!r}\n    {self.reasons[name]}" for name, value in self.options.items()]
        return "\n".join(["TensorrtExecutionProvider", *lines, f"then {', '.join(self.fallbacks)}: what TensorRT leaves over"])


def trtexec(
    path: str | Path,
    *,
    engine: str | Path | None = None,
    precision: Precision = "fp16",
    batches: tuple[int, int, int] = BATCHES,
    shapes: Shapes | None = None,
    version: int = 11,
) -> Command:
    """The ``trtexec`` command that builds and times an engine from an ONNX file, with sparse algorithms allowed.

    Inputs of any batch size (as ``export_onnx`` writes them) get a range: ``batches`` holds the smallest, usual and largest.
    ``shapes`` gives the other sizes where the file leaves them open, or all where the file is not at hand. ``version`` is
    TensorRT's: 11 takes the types from the file, so a file in fp32 runs in fp32; export a model in half precision for speed.
    """
    file = Path(path)
    _check(precision, batches, version)
    target = Path(engine) if engine is not None else file.with_suffix(".engine")
    flags = {
        f"--onnx={file}": "the file that nmsparse export --format onnx wrote; its zeros are the sparsity",
        "--sparsity=enable": "allow sparse algorithms for weights that are 2:4 already. Not =force, which overwrites weights "
        "with a pattern of its own: it is for timing only, and results are wrong",
        f"--saveEngine={target}": "the built engine, for this GPU and this version of TensorRT",
    }
    flags |= _precision_flags(precision, version)
    flags |= _shape_flags(file, batches, shapes)
    flags["--verbose"] = "log which layers were eligible and which took a sparse algorithm; sparse_layers() reads that log"
    return Command("trtexec", flags)


def onnxruntime_providers(
    path: str | Path,
    *,
    cache: str | Path | None = None,
    precision: Precision = "fp16",
    batches: tuple[int, int, int] = BATCHES,
    shapes: Shapes | None = None,
) -> Providers:
    """Provider options for onnxruntime's TensorRT execution provider, with sparse algorithms allowed; arguments as in
    :func:`trtexec`. ``cache`` is a folder for built engines, by default ``trt_cache`` beside the file."""
    file = Path(path)
    _check(precision, batches, 10)
    options: dict[str, Any] = {"trt_sparsity_enable": True}
    reasons = {"trt_sparsity_enable": "allow sparse algorithms for weights that are 2:4; taken where they time faster"}
    if precision != "fp32":
        name = f"trt_{precision}_enable"
        options[name] = True
        reasons[name] = f"compute in {precision}: sparse tensor cores have no fp32" + NEEDS.get(precision, "")
    folder = Path(cache) if cache is not None else file.parent / "trt_cache"
    options |= {"trt_engine_cache_enable": True, "trt_engine_cache_path": str(folder)}
    reasons["trt_engine_cache_enable"] = "keep built engines: timing all algorithms takes minutes"
    reasons["trt_engine_cache_path"] = "where; empty it after a change of GPU, driver, TensorRT or weights"
    for kind, sizes in _profiles(file, batches, shapes).items():
        options[f"trt_profile_{kind}_shapes"] = sizes
        reasons[f"trt_profile_{kind}_shapes"] = f"{KINDS[kind]} shapes to build for; without a range each new shape builds anew"
    return Providers(options, reasons)


KINDS = {"min": "the smallest", "opt": "the usual", "max": "the largest"}
# microsoft/onnxruntime#24743, opened when 1.22 was out; its documentation does not list the option
NEEDS = {"bf16": ". Takes onnxruntime 1.23: an older one refuses this option, prints so and goes on without TensorRT"}


def _check(precision: str, batches: tuple[int, int, int], version: int) -> None:
    if precision not in ("fp32", "fp16", "bf16"):
        raise ValueError(f'precision is "fp32", "fp16" or "bf16", got {precision!r}.')
    if len(batches) != 3 or not 1 <= batches[0] <= batches[1] <= batches[2]:
        raise ValueError(f"batches holds the smallest, usual and largest size of the batch, in this order, got {batches!r}.")
    if version not in (10, 11):
        raise ValueError(f"this knows the flags of TensorRT 10 and 11, not of {version!r}.")


def _precision_flags(precision: str, version: int) -> dict[str, str]:
    if precision == "fp32" or version >= 11:  # 11 has no precision flags: networks are strongly typed
        return {}
    return {f"--{precision}": f"compute in {precision}: sparse tensor cores have no fp32. TensorRT 11 takes types from the file"}


def _shape_flags(file: Path, batches: tuple[int, int, int], shapes: Shapes | None) -> dict[str, str]:
    return {
        f"--{kind}Shapes={sizes}": f"{KINDS[kind]} shapes to build for"
        + ("; algorithms are timed at these" if kind == "opt" else "")
        for kind, sizes in _profiles(file, batches, shapes).items()
    }


def _profiles(file: Path, batches: tuple[int, int, int], shapes: Shapes | None) -> dict[str, str]:
    """For smallest, usual and largest: all inputs as "name:1x16,other:1x16"; nothing where the file fixes every size."""
    inputs = _inputs(file, shapes or {})
    if not any(None in sizes for sizes in inputs.values()):
        return {}
    return {
        kind: ",".join(
            f"{name}:{'x'.join(str(batch if size is None else size) for size in sizes)}" for name, sizes in inputs.items()
        )
        for kind, batch in zip(KINDS, batches, strict=True)
    }


def _inputs(file: Path, shapes: Shapes) -> dict[str, list[int | None]]:
    """Sizes of every input; None is the batch."""
    if not file.exists():
        if not shapes:
            raise ValueError(f"{file} does not exist, so the names of its inputs are not known: give shapes={{name: sizes}}.")
        return {name: [None, *sizes[1:]] for name, sizes in shapes.items()}
    found: dict[str, list[int | None]] = {}
    for name, sizes in _read_inputs(file).items():
        given = shapes.get(name)
        if given is not None and len(given) != len(sizes):
            raise ValueError(f"{file}: input {name} has {len(sizes)} dims, shapes gives it {len(given)}.")
        filled = [size if size is not None or i == 0 or given is None else given[i] for i, size in enumerate(sizes)]
        if None in filled[1:]:
            raise ValueError(
                f"{file}: the size of dim {filled.index(None, 1)} of input {name} is open: give shapes={{{name!r}: [...]}} with "
                "all of its sizes."
            )
        found[name] = filled
    unknown = next((name for name in shapes if name not in found), None)
    if unknown is not None:
        raise ValueError(f"{file} has no input {unknown!r}; its inputs are {', '.join(found)}.")
    return found


def _read_inputs(file: Path) -> dict[str, list[int | None]]:
    """Inputs of an ONNX file with their sizes; None where a size is open. Weights are not loaded."""
    try:
        onnx: Any = import_module("onnx")
    except ImportError as error:
        raise ImportError('reading the inputs of an ONNX file needs the package onnx: pip install "nmsparse[onnx]".') from error
    graph = onnx.load(str(file), load_external_data=False).graph
    weights = {weight.name for weight in graph.initializer}
    return {
        entry.name: [dim.dim_value if dim.HasField("dim_value") else None for dim in entry.type.tensor_type.shape.dim]
        for entry in graph.input
        if entry.name not in weights
    }


# ---- what came of it ----


# The older wording, and that of newer logs (seen of TensorRT 10.14), which count and do not always list.
ELIGIBLE = (
    r"\(Sparsity\) Layers eligible for sparse math:(?P<names>.*)",
    r"\(Sparsity\) Found (?P<count>\d+) layer\(s\) eligible to use sparse tactics(?::(?P<names>.*))?",
)
CHOSEN = (
    r"\(Sparsity\) TRT inference plan picked sparse implementation for layers:(?P<names>.*)",
    r"\(Sparsity\) Chose (?P<count>\d+) layer\(s\) using sparse tactics(?::(?P<names>.*))?",
)


@dataclass(frozen=True)
class SparseLayers:
    """What a TensorRT build log says about sparsity."""

    eligible: list[str] = field(default_factory=list)
    """Layers whose weights are 2:4, by name. Empty also where the log only counts them."""
    chosen: list[str] = field(default_factory=list)
    """Those for which a sparse algorithm timed faster. Empty also where the log only counts them."""
    eligible_count: int | None = None
    """How many; None where the log does not say."""
    chosen_count: int | None = None
    """How many; None where the log does not say."""


def sparse_layers(log: str) -> SparseLayers:
    """Read the log of ``trtexec --verbose``: which layers were eligible and which run sparse, or how many, if it names none.

    A build may choose algorithms several times and report each time; this returns the last report, which is that of the
    engine. Of a log of several builds it is the last one's.
    """
    eligible, chosen = _last(log, ELIGIBLE), _last(log, CHOSEN)
    if eligible is None and chosen is None:
        raise ValueError(_why_nothing(log))
    (eligible_names, eligible_count), (chosen_names, chosen_count) = eligible or ([], None), chosen or ([], None)
    return SparseLayers(eligible_names, chosen_names, eligible_count, chosen_count)


def _last(log: str, wordings: tuple[str, ...]) -> tuple[list[str], int] | None:
    """Names and number of layers in the last report in any of the wordings; None without a report."""
    found = [match for wording in wordings for match in re.finditer(wording, log)]
    if not found:
        return None
    said = max(found, key=lambda match: match.start()).groupdict()
    names = [name.strip() for name in (said["names"] or "").split(",") if name.strip()]
    return names, int(said.get("count", len(names)))


def _why_nothing(log: str) -> str:
    other = re.search(r"\(Sparsity\).*", log)
    if other is not None:
        return (
            f"the log speaks of sparsity in words that this does not know: {other[0].strip()!r}. It knows "
            '"Layers eligible for sparse math" and "layer(s) eligible to use sparse tactics"; read this log yourself.'
        )
    return (
        'the log has no line with "(Sparsity)", so it does not say which layers run sparse: TensorRT writes these lines while it '
        "builds an engine, with sparse algorithms allowed and a verbose log. Build anew with --sparsity=enable --verbose "
        "(trtexec() gives the command), and pass the text of the whole log."
    )
