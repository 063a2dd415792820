"""What a claim file says: how to train, who takes part, what must come out, and what the paper printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nmsparse.workbench.compare import Candidate

Scale = Literal["toy", "cpu", "small", "full"]
SCALES: tuple[Scale, ...] = ("toy", "cpu", "small", "full")
"""On embedded data for tests; on two cores in an hour or so, where that can say anything; on one GPU in minutes; as in the paper,
for those with a cluster."""

Relation = Literal["better", "equal", "not worse", "below"]
HEADLINE = "headline"
"""The quantity that a task is compared by: validation loss, accuracy, ..."""


@dataclass(frozen=True)
class Setup:
    """How an experiment trains at one scale: the same for all contenders, except for the learning rate, which each tunes."""

    settings: Mapping[str, Any]
    """Of a TrainConfig. ``{data}`` in a path stands for the data folder."""
    rates: tuple[float, ...]
    """Learning rates that every contender tries; a single one is taken as it is."""
    tuning_share: float = 0.5
    """Length of a tuning run as a share of a run."""
    size: str = ""
    """How its size differs from the paper's."""
    margins_in: float = 1.0
    """What the margins of statements are worth in this setup's metric: losses per byte are smaller than losses per token."""


@dataclass(frozen=True)
class Contender:
    """A recipe that takes part, written as for nmsparse compare: "s-ste@2:4:mvue=false"."""

    text: str
    name: str = ""
    """How statements and tables call it, where the text does not do."""
    tuned_as: str = ""
    """Takes the learning rate that this contender found, in place of a search of its own."""
    spends_as: str = ""
    """Trains for as many updates as cost the training FLOPs of this contender."""

    @property
    def label(self) -> str:
        return self.name or self.text

    @property
    def candidate(self) -> Candidate:
        return Candidate.parse(self.text)


@dataclass(frozen=True)
class Experiment:
    """One task and model on which contenders meet."""

    name: str
    title: str
    setups: Mapping[Scale, Setup]
    """By scale; an experiment that is too large for two cores has none for them."""
    contenders: tuple[Contender, ...]
    is_timed: bool = False
    """Its runs have the device to themselves, because their step time is compared."""

    def __post_init__(self) -> None:
        labels = [contender.label for contender in self.contenders]
        for contender in self.contenders:
            for other in filter(None, (contender.tuned_as, contender.spends_as)):
                if other not in labels:
                    raise ValueError(f"{self.name}: {contender.label} refers to {other!r}, which does not take part.")
        if len(set(labels)) < len(labels):
            raise ValueError(f"{self.name}: two contenders have one name: {', '.join(labels)}.")

    def contender(self, label: str) -> Contender:
        for contender in self.contenders:
            if contender.label == label:
                return contender
        raise ValueError(f"{self.name} has no contender {label!r}; it has {', '.join(c.label for c in self.contenders)}.")


@dataclass(frozen=True)
class Statement:
    """Something that the paper says, in a form that can be tested: left is better than right, equal, not worse, or below it."""

    experiment: str
    left: str
    relation: Relation
    right: str
    text: str
    """In plain words."""
    margin: float = 0.0
    """The difference that still counts as equal, or as not worse; in the metric's own unit."""
    quantity: str = HEADLINE
    right_quantity: str = ""
    """Where it is another one than on the left: a flip rate at the end against the highest one."""
    is_claimed: bool = True
    """By the paper; the others are ours, beside it."""


@dataclass(frozen=True)
class Published:
    """One row of numbers that the authors printed."""

    setting: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class Chart:
    """One picture: a recorded quantity over time."""

    experiment: str
    title: str
    column: str = HEADLINE
    """The headline of the validations, or a column of the log rows."""
    contenders: tuple[str, ...] = ()
    """Those shown; all by default."""
    over: Literal["steps", "seconds"] = "steps"


@dataclass(frozen=True)
class Advice:
    """A situation of a user, and where the answer was measured."""

    situation: str
    experiment: str
    among: tuple[str, ...]
    """Contenders to choose from."""
    cost: str = ""
    """What the choice brings or costs beside the metric."""
    by: Literal["headline", "seconds"] = HEADLINE
    """What counts: the metric at the end, or the time to a metric that all reach."""


@dataclass(frozen=True)
class Claim:
    """A paper's claim and its test."""

    name: str
    title: str
    paper: str
    says: str
    """The claim in plain words."""
    experiments: tuple[Experiment, ...]
    statements: tuple[Statement, ...]
    published: tuple[Published, ...] = ()
    published_note: str = ""
    """Where the numbers come from, and what to think of them."""
    charts: tuple[Chart, ...] = ()
    advice: tuple[Advice, ...] = ()
    deviations: tuple[str, ...] = ()
    """How all scales, or that on one GPU, differ from the paper in more than size."""

    def __post_init__(self) -> None:
        for statement in self.statements:
            for label in (statement.left, statement.right):
                self.experiment(statement.experiment).contender(label)
        for part in (*self.charts, *self.advice):
            labels = part.contenders if isinstance(part, Chart) else part.among
            for label in labels:
                self.experiment(part.experiment).contender(label)

    def experiment(self, name: str) -> Experiment:
        for experiment in self.experiments:
            if experiment.name == name:
                return experiment
        raise ValueError(f"{self.name} has no experiment {name!r}; it has {', '.join(e.name for e in self.experiments)}.")
