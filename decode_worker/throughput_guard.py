"""Whether the stop policy pays: short probes of arrival order (FCFS), and a fallback to it where that is faster.

Compared are decode tokens per second of engine time, first the policy's, then those of arrival order:
    RESTING      policy         until the interval is over and requests wait
    MEASURING    policy         until `probe_s` of its steps have counted
    SETTLING     arrival order  for `probe_s`; nothing counts, the requests that the policy admitted still run
    PROBING      arrival order  until `probe_s` of its steps have counted: the verdict
    FALLBACK     arrival order  for `fallback_s`, then RESTING for a short interval
Steps count in which there was a choice: requests waited. Arrival order may have admitted them all, so its steps also
count where the batch is as large as the policy's was. Where too few count, as in an idle engine, nothing is said.

The policy loses a probe below 0.97 of arrival order. It falls back when it lost two in a row and the ratio, smoothed
over probes, agrees; twice as long each time, until it wins (1.1) again. While it wins the interval doubles; after a
probe that it lost the next comes soon. Not from the paper. Clocks are the caller's.
"""

from dataclasses import dataclass
from enum import Enum, auto
from math import inf

LOSES_BELOW = 0.97
WINS_ABOVE = 1.1
_LOSSES_TO_FALL_BACK = 2
# No ratio counts as more extreme, so that a few probes outweigh any one.
_LEAST_RATIO, _GREATEST_RATIO = 0.5, 2.0
# Shares and multiples of the interval and of the fallback.
_SOON = 0.25
_LONGEST_INTERVAL = 8
_LONGEST_FALLBACK = 16
# How many times `probe_s` a measurement may take.
_PATIENCE = 3


class Mode(Enum):
    """PROBE and FALLBACK both admit by arrival."""

    POLICY = "policy"
    PROBE = "probe"
    FALLBACK = "fallback"


class _Phase(Enum):
    RESTING = auto()
    MEASURING = auto()
    SETTLING = auto()
    PROBING = auto()
    FALLBACK = auto()


_MODES = {
    _Phase.RESTING: Mode.POLICY,
    _Phase.MEASURING: Mode.POLICY,
    _Phase.SETTLING: Mode.PROBE,
    _Phase.PROBING: Mode.PROBE,
    _Phase.FALLBACK: Mode.FALLBACK,
}


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """When it probes, and for how long it falls back."""

    enabled: bool = True
    probe_interval_s: float = 30.0
    # A probe admits by arrival for twice that, and for four times that at most.
    probe_s: float = 1.0
    fallback_s: float = 60.0


@dataclass(slots=True)
class _Measurement:
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self.steps += 1


class ThroughputGuard:
    """Before each step it gives the mode; after the step it takes in what that did."""

    def __init__(self, settings: GuardSettings) -> None:
        # Those with a verdict.
        self.probes = 0
        self.fallbacks = 0
        # What the last probe measured, policy / arrival order.
        self.last_ratio: float | None = None
        self._settings = settings
        self._phase = _Phase.RESTING
        # When the phase is over or given up. The first interval begins with the first question.
        self._until_s = inf
        self._policy = _Measurement()
        self._arrival_order = _Measurement()
        self._smoothed: float | None = None
        self._losses = 0
        self._interval_times = 1
        self._fallback_times = 1

    def mode(self, now_s: float) -> Mode:
        if not self._settings.enabled:
            return Mode.POLICY
        if self._until_s == inf:
            self._rest(now_s, self._interval_times)
        while self._phase is not _Phase.RESTING and now_s >= self._until_s:
            self._time_is_over(now_s)
        return _MODES[self._phase]

    def executed(self, now_s: float, decode_tokens: int, step_s: float, contended: bool) -> None:
        """A step that did nothing but decode. contended: requests waited for a place in it."""
        if step_s <= 0 or decode_tokens <= 0:
            return
        probe_s = self._settings.probe_s
        if self._phase is _Phase.RESTING and contended and now_s >= self._until_s:
            self._policy = _Measurement()
            self._enter(_Phase.MEASURING, now_s + _PATIENCE * probe_s)
        elif self._phase is _Phase.MEASURING and contended:
            self._policy.add(decode_tokens, step_s)
            if self._policy.seconds >= probe_s:
                self._enter(_Phase.SETTLING, now_s + probe_s)
        elif self._phase is _Phase.PROBING and (
            contended or decode_tokens * self._policy.steps >= self._policy.tokens  # as many as the policy's
        ):
            self._arrival_order.add(decode_tokens, step_s)
            if self._arrival_order.seconds >= probe_s:
                self._judge(now_s)

    def _time_is_over(self, now_s: float) -> None:
        """Of a phase other than RESTING, which lasts until requests wait."""
        match self._phase:
            case _Phase.MEASURING:
                self._rest(now_s, 0)
            case _Phase.SETTLING:
                self._arrival_order = _Measurement()
                self._enter(_Phase.PROBING, self._until_s + _PATIENCE * self._settings.probe_s)
            case _Phase.PROBING:
                self._rest(now_s, self._interval_times)
            case _Phase.FALLBACK:
                self._rest(now_s, _SOON)

    def _judge(self, now_s: float) -> None:
        policy, arrival_order = self._policy, self._arrival_order
        ratio = (policy.tokens / policy.seconds) / (arrival_order.tokens / arrival_order.seconds)
        clipped = min(max(ratio, _LEAST_RATIO), _GREATEST_RATIO)
        self._smoothed = clipped if self._smoothed is None else (self._smoothed + clipped) / 2
        self.probes += 1
        self.last_ratio = ratio
        self._losses = self._losses + 1 if ratio < LOSES_BELOW else 0
        wins = min(ratio, self._smoothed) > WINS_ABOVE
        self._interval_times = min(_LONGEST_INTERVAL, 2 * self._interval_times) if wins else 1
        if wins:
            self._fallback_times = 1
        if self._losses >= _LOSSES_TO_FALL_BACK and self._smoothed < LOSES_BELOW:
            self.fallbacks += 1
            self._enter(_Phase.FALLBACK, now_s + self._fallback_times * self._settings.fallback_s)
            self._fallback_times = min(_LONGEST_FALLBACK, 2 * self._fallback_times)
        else:
            self._rest(now_s, _SOON if self._losses else self._interval_times)

    def _rest(self, now_s: float, intervals: float) -> None:
        self._enter(_Phase.RESTING, now_s + intervals * self._settings.probe_interval_s)

    def _enter(self, phase: _Phase, until_s: float) -> None:
        self._phase = phase
        self._until_s = until_s
