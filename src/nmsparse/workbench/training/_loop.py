"""The training loop: accelerate for devices, precision and processes; everything else is here to read.

    for every update:   learning rate and seed of this step  ->  micro-batches: forward, backward  ->  clip  ->  optimizer.step()
    now and then:       a log row, a validation with a look at the masks, a checkpoint

Order of examples, learning rate and random numbers are functions of the seed and the step, so a checkpoint needs none of them.
"""

from __future__ import annotations

import math
import statistics
import time
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import Tensor, nn

import nmsparse as nm
from nmsparse.functional import hash_integers
from nmsparse.nn import SparseModule, sparse_modules
from nmsparse.workbench.extras import package
from nmsparse.workbench.records import RESULT, RUN, RunRecord, RunWriter
from nmsparse.workbench.tasks import IGNORED, Batch
from nmsparse.workbench.training._build import (
    compile_,
    end_accelerator,
    environment_of,
    locked,
    make_accelerator,
    make_model,
    make_optimizer,
    memory_of,
    model_name,
    open_task,
)
from nmsparse.workbench.training._checkpoints import CheckpointError, Checkpoints, Restorable, read_facts, restore
from nmsparse.workbench.training._config import TrainConfig
from nmsparse.workbench.training._order import Order, learning_rate
from nmsparse.workbench.training._telemetry import MaskWatch, moments_of


class DivergenceError(FloatingPointError):
    """Training stopped at a loss or gradient that is NaN or infinite."""


class Progress(Protocol):
    """Listens to a run."""

    def __call__(self, step: int, row: dict[str, Any] | None) -> None:
        """After every update; ``row`` is the log row where one was written."""


def silent(step: int, row: dict[str, Any] | None) -> None:
    """The listener that says nothing."""


def train(config: TrainConfig, folder: str | Path, *, resume: bool = False, progress: Progress = silent) -> RunRecord:
    """Train as the configuration says; records, checkpoints and the finished model go into the folder.

    ``resume`` continues from the newest checkpoint, or from the start if there is none. A folder that holds a run is refused
    otherwise, and so is a run with other settings. A finished run is returned as it is.
    """
    folder = Path(folder)
    if resume and (folder / RUN).exists() and (folder / RESULT).exists():
        record = RunRecord(folder)
        _check_same_run(config, record)
        if record.result is not None and record.result["status"] == "finished":
            return record
    if not resume and (folder / RUN).exists():
        raise ValueError(f"{folder} holds a run already: resume it, or choose another folder.")
    session = Session(config, folder)
    try:
        session.start(resume)
        session.fit(progress)
    except FloatingPointError as error:
        raise DivergenceError(session.give_up(str(error))) from error
    finally:
        session.close()
    return RunRecord(session.folder)


def _check_same_run(config: TrainConfig, record: RunRecord) -> None:
    differences = config.differences(TrainConfig.from_dict(record.settings, str(record.folder / RUN)))
    if differences:
        raise ValueError(f"{record.folder} holds another run ({'; '.join(differences[:4])}): choose another folder.")


@dataclass
class Interval:
    """What happened since the last log row."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    units: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint: a resumed run writes the same next row."""
        return {**vars(self), "losses": [float(loss) for loss in self.losses], "norms": [float(norm) for norm in self.norms]}

    @classmethod
    def from_dict(cls, saved: dict[str, Any], device: torch.device) -> Interval:
        losses, norms = ([torch.tensor(value, device=device) for value in saved[name]] for name in ("losses", "norms"))
        return cls(losses, norms, saved["units"], saved["seconds"])


class Session:
    """One run while it trains."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self.config = config
        self.accelerator = make_accelerator(config, folder)
        # one folder for all processes, though each may have named it by its own clock
        self.folder = folder = package("accelerate.utils").broadcast_object_list([folder])[0]
        self.task = open_task(config)
        self.parts = config.accumulate * self.accelerator.num_processes
        if config.batch % self.parts:
            raise ValueError(
                f"batch = {config.batch} examples do not divide into {config.accumulate} micro-batches on "
                f"{self.accelerator.num_processes} processes."
            )
        torch.manual_seed(config.seed)  # recipes with one seed start from the same weights
        bare, targets, exclude = make_model(config, self.task)
        bare.to(self.accelerator.device)  # masks and scales of a large model take a CPU many seconds
        if self.task.facts.kind == "images" and self.accelerator.device.type == "cuda":
            bare.to(memory_format=torch.channels_last)  # pyrefly: ignore  # the layout that tensor cores want of convolutions
        self.run = nm.sparsify_(bare, config.make_recipe(), targets, exclude, emulate=config.emulate, seed=config.seed)
        optimizer = make_optimizer(config, bare, self.accelerator.device)
        if config.compile:
            compile_(bare)
        self.model, self.optimizer = self.accelerator.prepare(bare, optimizer)
        self.bare: nn.Module = self.accelerator.unwrap_model(self.model)
        self.inner: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        self.run.attach(self.inner, total_steps=config.steps, stats_every=config.intervals[0])
        self.order = Order(len(self.task.train), config.batch, config.seed)
        self.watch = MaskWatch(self.bare, self.run)
        self.checkpoints = Checkpoints(folder / "checkpoints", config.keep)
        self.step = 0
        """Updates done."""
        self.seconds = 0.0
        self.interval = Interval()
        self.validated: dict[str, float] | None = None
        """The newest metrics, the same on every process."""
        self.writer: RunWriter | None = None
        self._lock: IO[str] | None = None

    def start(self, resume: bool) -> None:
        """Take the folder, and go back to its newest checkpoint."""
        if self.accelerator.is_main_process:
            self._lock = locked(self.folder)
        if resume:
            self._restore()
        if self.accelerator.is_main_process:
            kept = self.step if self.step else -1  # rows of step 0 are written anew by a run that starts anew
            self.writer = RunWriter(self.folder, kept)
            self.writer.describe(self._describe())
        if self.config.tracker:
            self.accelerator.init_trackers("nmsparse", {key: str(value) for key, value in self.config.to_dict().items()})

    # ---- one update ----

    def fit(self, progress: Progress) -> None:
        if self.step == 0:
            self._look()
        self.model.train()
        mark = self._now()
        while self.step < self.config.steps:
            self._update()
            is_last, row = self.step == self.config.steps, None
            logs, validates, saves = (is_last or self.step % every == 0 for every in self.config.intervals)
            if logs or validates or saves:
                self.interval.seconds += self._now() - mark  # what follows is not training
                row = self._log() if logs else None
                if validates:
                    self._validate()
                    self._look()
                if saves:
                    self._save()
                mark = self._now()
            progress(self.step, None if row is None else {**row, "unit": self.task.unit})
        self._finish()

    def _update(self) -> None:
        config = self.config
        lr = learning_rate(self.step, config.steps, config.peak_lr, config.schedule, config.warmup)
        for group in self.inner.param_groups:
            group["lr"] = lr
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        torch.manual_seed(hash_integers(config.seed, self.step, rank))  # of dropout
        total = torch.zeros((), device=self.accelerator.device)
        for micro in range(config.accumulate):
            part = micro * processes + rank
            batch = self._batch(self.task.train.__getitems__(self.order.indices(self.step, part, self.parts)), part)
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss * self._weight(part)
                total += loss.detach() / config.accumulate
                self._check_at_once(total)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self._clip()
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.interval.units += self.task.tokens(batch)
        self.interval.losses.append(total)
        self.step += 1

    def _batch(self, batch: Batch, part: int) -> Batch:
        device = self.accelerator.device
        if device.type == "cuda":  # a copy from ordinary memory would wait for the GPU
            batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        on_device = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        return self.task.augment(
            on_device, torch.Generator().manual_seed(hash_integers(self.config.seed, self.step, part, 0xA06))
        )

    def _weight(self, part: int) -> float:
        """What a part's mean loss counts for in the mean over all labels of an update: translations differ in length."""
        if self.parts == 1 or self.task.facts.kind != "translation":
            return 1.0
        wanted = [self.order.indices(self.step, part, self.parts), self.order.indices(self.step)]
        own, all_parts = (int((self.task.train.__getitems__(indices)["labels"] != IGNORED).sum()) for indices in wanted)
        return own * self.parts / all_parts

    def _clip(self) -> None:
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip or math.inf)
        self.interval.norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    # ---- NaN and Inf ----

    def _check_at_once(self, loss: Tensor) -> None:
        """On a CPU looking costs nothing; a GPU would wait, so it looks when rows are written and before a checkpoint."""
        if self.accelerator.device.type == "cpu" and not math.isfinite(float(loss)):
            raise FloatingPointError(f"the loss is {float(loss)} at update {self.step + 1}")

    def _check_losses(self) -> None:
        losses = torch.stack(self.interval.losses).tolist() if self.interval.losses else []
        for offset, loss in enumerate(losses):
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss} at update {self.step - len(losses) + offset + 1}")

    def _check_result(self) -> None:
        """The last update may be the one that spoils the weights, and no loss comes after it."""
        value = None if self.validated is None else self.validated.get(self.task.headline)
        if value is not None and not math.isfinite(value):
            raise FloatingPointError(f"the validation {self.task.headline} is {value} after update {self.step}")

    def give_up(self, reason: str) -> str:
        good = self.checkpoints.newest()
        where = "there is no checkpoint yet" if good is None else f"the last good checkpoint is {good}"
        message = f"{reason.rstrip('.')}; training stopped, {where}. Lower the learning rate, clip harder, or use bf16."
        if self.writer is not None:
            self.writer.finish({"status": "diverged", "steps": self.step, "message": message, "seconds": self.seconds})
        return message

    # ---- rows ----

    def _now(self) -> float:
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _log(self) -> dict[str, Any]:
        self._check_losses()
        updates, spent = len(self.interval.losses), self.interval.seconds
        self.seconds += spent
        total = self.run.stats()["total"]
        moments = moments_of(self.inner, self.run.parameters())
        row = {
            "loss": float(self.accelerator.reduce(torch.stack(self.interval.losses).mean(), "mean")),
            "lr": self.inner.param_groups[0]["lr"],
            "grad_norm": float(torch.stack(self.interval.norms).mean()) if self.interval.norms else None,
            "step_ms": 1e3 * spent / updates,
            "units_per_second": self.interval.units * self.accelerator.num_processes / spent,
            "seconds": self.seconds,
            "flip_rate": total["flip_rate"],
            "density": total["density"],
            "gradient_noise": moments.noise,
            "variance": moments.variance,
            **{name: total[name] for name in ("variance_change", "switched_at") if name in total},
            "memory_gib": memory_of(self.accelerator.device) / 2**30,
        }
        self.interval = Interval()
        self._write("train", row)
        return row

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        if self.writer is not None:
            self.writer.add(kind, self.step, **values)
        if self.config.tracker:
            named = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
            self.accelerator.log(named, step=self.step)

    def _validate(self) -> dict[str, float]:
        """Metrics of the weights that would be shipped: in evaluation mode, layers obey their final pattern."""
        # compiling for validation too takes longer than all of it
        with torch.compiler.set_stance("force_eager") if self.config.compile else nullcontext():
            self.validated = self._measured()
        return self.validated

    @torch.no_grad()
    def _measured(self) -> dict[str, float]:
        self.model.eval()
        totals: dict[str, Tensor] = {}
        for indices, counts in self._validation_batches():
            batch = {name: t.to(self.accelerator.device) for name, t in self.task.valid.__getitems__(indices).items()}
            with self.accelerator.autocast():
                measured = self.task.measure(self.model(**batch), batch)
            totals = {name: totals.get(name, 0) + counts * value for name, value in measured.items()}
        self.model.train()
        gathered = {name: self.accelerator.reduce(value, "sum") for name, value in totals.items()}
        metrics = self.task.summarize(gathered)
        self._write("valid", dict(metrics))
        return metrics

    def _validation_batches(self) -> list[tuple[list[int], int]]:
        """Examples that this process measures, and whether they count: one without work measures something, for nothing, because
        all processes must go through the same collectives."""
        config, processes = self.config, self.accelerator.num_processes
        wanted = min(len(self.task.valid), config.eval_batches * config.batch or len(self.task.valid))
        size = config.batch // self.parts
        batches = [list(range(start, min(start + size, wanted))) for start in range(0, wanted, size)]
        mine = [(batch, 1) for batch in batches[self.accelerator.process_index :: processes]]
        return mine + [(batches[0], 0)] * (-(-len(batches) // processes) - len(mine))

    def _look(self) -> None:
        """The masks, and each layer's statistics."""
        self._write("masks", dict(self.watch.look()))
        corner = self.watch.corner()
        layers = self.run.stats()["layers"]
        if self.writer is not None:
            self.writer.add("layers", self.step, layers=layers)
            if corner is not None:
                self.writer.add("mask", self.step, **corner)

    # ---- checkpoints ----

    @property
    def _state(self) -> Restorable:
        return Restorable(self.bare, self.inner, self.run, self.watch, self.accelerator.scaler)

    def _save(self) -> None:
        self._check_losses()
        if not self.config.save:
            return
        facts = {
            "config": self.config.to_dict(),
            "seconds": self.seconds,
            "interval": self.interval.to_dict(),
            "cpu_threads": torch.get_num_threads(),
        }
        self.checkpoints.save(self.step, self._state, facts, self.accelerator.is_main_process)
        self.accelerator.wait_for_everyone()

    def _restore(self) -> None:
        newest = self.checkpoints.newest()
        if newest is None:
            if (self.folder / RUN).exists():
                _check_same_run(self.config, RunRecord(self.folder))
            return
        facts = read_facts(newest)
        differences = self.config.differences(TrainConfig.from_dict(facts["config"], str(newest)))
        if differences:
            raise CheckpointError(f"{newest} was made with other settings: {'; '.join(differences[:4])}.")
        restore(newest, self._state)
        if self.accelerator.device.type == "cpu":
            torch.set_num_threads(facts["cpu_threads"])  # sums over another number of threads round otherwise
        self.step, self.seconds = facts["step"], facts["seconds"]
        self.interval = Interval.from_dict(facts["interval"], self.accelerator.device)

    # ---- the end ----

    def _finish(self) -> None:
        self._check_result()
        shipped = self._ship()
        if self.writer is not None:
            self._conclude(self.writer, shipped)
        self.accelerator.wait_for_everyone()

    def _conclude(self, writer: RunWriter, shipped: dict[str, Any]) -> None:
        record = RunRecord(self.folder)
        step_ms = statistics.median(row["step_ms"] for row in record.rows("train"))
        valid = {name: value for name, value in record.rows("valid")[-1].items() if name not in ("kind", "step")}
        writer.finish(
            {"status": "finished", "steps": self.step, "valid": valid, **shipped, "step_ms": step_ms, "seconds": self.seconds}
        )

    @torch.no_grad()
    def _ship(self) -> dict[str, Any]:
        """Write the finished model and count what is in the file, or what would be."""
        self.bare.eval()
        sparse = [nm.effective_weight(module) for _, module in sparse_modules(self.bare)]
        whole = [weight.full_tensor() if hasattr(weight, "full_tensor") else weight for weight in sparse]  # pyrefly: ignore
        non_zero = sum(int((weight != 0).sum()) for weight in whole) / max(1, sum(weight.numel() for weight in whole))
        if any(hasattr(weight, "full_tensor") for weight in sparse) or not self.accelerator.is_main_process:
            return {"non_zero": non_zero, "violations": None, "model": None}  # a sharded model stays in its checkpoint
        is_sparse = self.run.layers and not nm.recipe_info(self.run.recipe).ends_dense and self.config.recipe != "dense"
        if not self.config.save:
            broken = sum(self._violations(module) for _, module in sparse_modules(self.bare)) if is_sparse else 0
            return {"non_zero": non_zero, "violations": broken, "model": None}
        target = self.folder / "model"
        nm.save(self.bare, target)
        if hasattr(self.bare, "config"):
            configuration: Any = copy(self.bare.config)
            configuration.architectures = [type(self.bare).__name__]
            configuration.save_pretrained(target)
        broken = sum(t.violations for t in nm.verify(target).tensors if t.status != "dense") if is_sparse else 0
        return {"non_zero": non_zero, "violations": broken, "model": target.name}

    def _violations(self, module: SparseModule) -> int:
        """Groups of a layer that break the pattern."""
        return int(nm.functional.violations(module.view_weight(nm.effective_weight(module)), self.run.recipe.pattern))

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        if self._lock is not None:
            self._lock.close()
        end_accelerator(self.accelerator)

    def _describe(self) -> dict[str, Any]:
        config, task = self.config, self.task
        sparse = sum(weight.numel() for weight in self.run.parameters())
        parameters = sum(parameter.numel() for parameter in self.bare.parameters())
        return {
            "label": config.label,
            "recipe": config.recipe,
            "pattern": config.pattern,
            "seed": config.seed,
            "task": {
                "name": task.name,
                "headline": task.headline,
                "higher_is_better": task.higher_is_better,
                "unit": task.unit,
                "train_examples": len(task.train),
                "valid_examples": len(task.valid),
            },
            "config": config.to_dict(),
            "model": {
                "name": config.pretrained or model_name(config, task),
                "parameters": parameters,
                "sparse_parameters": sparse,
            },
            "environment": environment_of(self.accelerator),
            "skipped": self.run.skipped,
            "products": self.run.products,
        }
