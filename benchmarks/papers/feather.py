"""FEATHER, section 5, in the simulator (`benchmarks.papers.feather_runs`), beside what its text states.

The plots' values are not printed; compared is what the text says, mostly ratios. FEATHER stands for the published
heuristic with the best candidate first and no bound on waiting; the learned policies, which need minutes to converge,
are run in a few cells. Every cell comes three times, since the paper does not tell apart what it calls
locality from vLLM's cascade attention of that time, which was on only while all running requests shared a prefix:
`cache`, `cascade`, `memory`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.papers.feather_runs import (
    CACHE,
    CASCADE,
    FCFS,
    LOCALITIES,
    LONGCHAT,
    MEMORY,
    PRODUCTION,
    Load,
    Ran,
    decode_step_s,
    simulate,
)
from benchmarks.papers.table import Cell, Progress

FEATHER, LEARNING = "heuristic", ("bandit", "q_learning")
_SECONDS, _QUICK_SECONDS, _LEARNING_SECONDS = 60.0, 10.0, 120.0

_DEFAULT = Load()
# More than arrive where nobody shares: prefill alone takes 0.4 s each.
_UNSHARED = replace(_DEFAULT, groups=0, rate=10.0)
_WHY_GAIN = {
    CACHE: "what is read again comes from L2, so mixing costs next to nothing, and a smaller batch loses",
    CASCADE: "mixing turns cascade attention off, but five times the batch makes up for it",
    MEMORY: "each request of a mixed batch reads its whole prefix from memory, as the paper's FCFS seems to",
}
_WHY_NO_CLIFF = {
    CACHE: "one step; no cliff: the divergent prefix is 2% of what is read",
    CASCADE: "one step; all is read again, from L2",
    MEMORY: "one step; all is read again, from memory: more than the paper's step lost",
}
_WHY_ONE_GROUP = "nobody's wait is bounded: one group keeps the batch while any of it arrive, 4 requests/s"
_WHY_MANY = {
    CACHE: "FCFS recomputes evicted prefixes. How many of a group wait depends on how long one measures: not printed",
    CASCADE: "as cache: batches are small, and recomputing decides",
    MEMORY: "batches are mixed in part: one below four requests takes any loss",
}
_WHY_LEARNED = (
    "two minutes; in a mixed batch nothing is lost, so all are admitted, and both learners choose alike. It depends on "
    "the window: 150 s instead gave 1.04, 1.51 and 3.95"
)

# Of a load, a policy, a model of locality and seconds of arrivals.
Simulated = Callable[[Load, str, str, float], Ran]


class Runs:
    """Under one model of locality; each is made once."""

    def __init__(
        self, locality: str, seconds: float, learning_seconds: float, progress: Progress, simulated: Simulated
    ) -> None:
        self.locality = locality
        self._simulated = simulated
        self._seconds, self._learning_seconds = seconds, learning_seconds
        self._progress = progress
        self._known: dict[tuple[Load, str, float], Ran] = {}

    def of(self, load: Load, policy: str, seconds: float | None = None) -> Ran:
        """seconds: as it takes the policy unless given."""
        seconds = seconds or self._seconds_for(policy)
        key = load, policy, seconds
        if key not in self._known:
            self._progress(f"{self.locality}, {policy}, {_told(load)}")
            self._known[key] = self._simulated(load, policy, self.locality, seconds)
        return self._known[key]

    def gain(self, load: Load, policy: str = FEATHER) -> float:
        """Times the throughput of FCFS in the same time."""
        fcfs = self.of(load, FCFS, self._seconds_for(policy))
        return self.of(load, policy).tokens_per_s / fcfs.tokens_per_s

    def _seconds_for(self, policy: str) -> float:
        return self._learning_seconds if policy in LEARNING else self._seconds


@dataclass(frozen=True, slots=True)
class _Claim:
    """One cell of a figure or table, and how it is simulated."""

    figure: str
    cell: str
    unit: str
    # (0, 1) where the text says less, without a number.
    paper: float | tuple[float, float] | None
    ours: Callable[[Runs], float]
    # For all, or by locality.
    why: str | Mapping[str, str] = ""
    # Also in the quick variant.
    quick: bool = False

    def of(self, runs: Runs) -> Cell:
        why = self.why if isinstance(self.why, str) else self.why[runs.locality]
        return Cell(self.figure, f"{self.cell}, {runs.locality}", self.unit, self.paper, self.ours(runs), why)


def _divergent(runs: Runs) -> float:
    """500 requests with 10,000 + 20 tokens, half of 50 generated: one of another prefix, over none."""
    requests, prefix, own = 500, 10_000, 20 + 25
    context, distinct = requests * (prefix + own), prefix + requests * own
    alike_s = decode_step_s(runs.locality, requests, context, distinct, prefix)
    return decode_step_s(runs.locality, requests, context, distinct + prefix, 0) / alike_s


def _all_shared(runs: Runs) -> float:
    """100 requests of 2,000 tokens, half of 50 generated: all of the prompt shared, over nothing."""
    requests, prompt, own = 100, 2000, 25
    context = requests * (prompt + own)
    shared_s = decode_step_s(runs.locality, requests, context, prompt + requests * own, prompt)
    return decode_step_s(runs.locality, requests, context, context, 0) / shared_s


def _groups(number: int, model: str = _DEFAULT.model) -> Load:
    return replace(_DEFAULT, groups=number, model=model)


_TIMES = "x FCFS"
_CLAIMS = (
    _Claim("Figure 3.2, experiment 1", "one divergent request of 500, step time", "x none", 2.0, _divergent,
           _WHY_NO_CLIFF, quick=True),
    _Claim("Figure 3.4, experiment 2", "2,000 tokens shared by 100 requests, throughput", "x none shared", 1.6,
           _all_shared, "one step, all of its context", quick=True),
    _Claim("Figure 5.1, arrival rate", "5 requests/s, throughput", _TIMES, (1.0, 4.0),
           lambda runs: runs.gain(replace(_DEFAULT, rate=5.0)),
           "better at every rate, says the text, 4 times at most; few tokens in a minute, so one answer more counts"),
    _Claim("Figure 5.1, arrival rate", "20 requests/s, throughput", _TIMES, (1.0, 4.0),
           lambda runs: runs.gain(replace(_DEFAULT, rate=20.0)), _WHY_ONE_GROUP),
    _Claim("Figure 5.1, arrival rate", "20 requests/s, bandit, throughput", _TIMES, (1.0, 4.0),
           lambda runs: runs.gain(replace(_DEFAULT, rate=20.0), "bandit"), "two minutes"),
    _Claim("Figure 5.1, arrival rate", "100 requests/s, throughput", _TIMES, 4.0, lambda runs: runs.gain(_DEFAULT),
           _WHY_GAIN, quick=True),
    _Claim("Figure 5.1, arrival rate", "100 requests/s, mean batch", _TIMES, (0.0, 1.0),
           lambda runs: runs.of(_DEFAULT, FEATHER).mean_batch / runs.of(_DEFAULT, FCFS).mean_batch,
           "the text says smaller", quick=True),
    _Claim("Figure 5.1, arrival rate", "100 requests/s, time between tokens", _TIMES, (0.0, 1.0),
           lambda runs: runs.of(_DEFAULT, FEATHER).tbt_ms / runs.of(_DEFAULT, FCFS).tbt_ms,
           "the text says substantially lower", quick=True),
    _Claim("Figure 5.1, arrival rate", "100 requests/s, FCFS", "tokens/s", 950.0,
           lambda runs: runs.of(_DEFAULT, FCFS).tokens_per_s,
           "the paper's is 3,800 over 4: 500 prefixes of 5,000 tokens read in 0.53 s, as fast as the device memory can",
           quick=True),
    _Claim("Figure 5.2, prefix groups", "FCFS, from 1 group to 2, throughput", "x 1 group", None,
           lambda runs: runs.of(_groups(2), FCFS).tokens_per_s / runs.of(_groups(1), FCFS).tokens_per_s,
           "the text says a sharp drop"),
    _Claim("Figure 5.2, prefix groups", "FCFS, from 20 groups to 100, mean batch", "x 20 groups", (0.0, 0.5),
           lambda runs: runs.of(_groups(100), FCFS).mean_batch / runs.of(_groups(20), FCFS).mean_batch,
           "the text says a sharp reduction: KV does not fit"),
    _Claim("Figure 5.2, prefix groups", "1 group, throughput", _TIMES, 1.0, lambda runs: runs.gain(_groups(1)),
           "nothing to group"),
    _Claim("Figure 5.2, prefix groups", "100 groups, throughput", _TIMES, 10.0, lambda runs: runs.gain(_groups(100)),
           _WHY_MANY),
    _Claim("Figure 5.2, prefix groups", "100 groups, bandit, throughput", _TIMES, 10.0,
           lambda runs: runs.gain(_groups(100), "bandit"), "two minutes"),
    _Claim("Figure 5.3, decode tokens", "20 tokens, throughput", _TIMES, 1.0,
           lambda runs: runs.gain(replace(_DEFAULT, decode_tokens=20)),
           "where the paper has its crossover"),
    _Claim("Figure 5.3, decode tokens", "200 tokens, FEATHER", "tokens/s", 3800.0,
           lambda runs: runs.of(_DEFAULT, FEATHER).tokens_per_s,
           "one group's arrivals, 20 requests/s of 200 tokens, bound it at 4,000"),
    _Claim("Figure 5.4, shared tokens", "advantage with 10,000 tokens", "x advantage with 1,000", None,
           lambda runs: runs.gain(replace(_DEFAULT, shared_tokens=10_000))
           / runs.gain(replace(_DEFAULT, shared_tokens=1000)), "the text says that it grows"),
    _Claim("Figure 5.7, LongChat 13B", "FCFS, from 1 group to 2, throughput", "x 1 group", None,
           lambda runs: runs.of(_groups(2, LONGCHAT), FCFS).tokens_per_s
           / runs.of(_groups(1, LONGCHAT), FCFS).tokens_per_s, "the text says a sharp drop"),
    _Claim("Figure 5.7, LongChat 13B", "FCFS, from 2 groups to 5, mean batch", "x 2 groups", (0.0, 0.5),
           lambda runs: runs.of(_groups(5, LONGCHAT), FCFS).mean_batch / runs.of(_groups(2, LONGCHAT), FCFS).mean_batch,
           "the text says a steep reduction: KV is evicted"),
    _Claim("Figure 5.7, LongChat 13B", "100 groups, throughput", _TIMES, 22.0,
           lambda runs: runs.gain(_groups(100, LONGCHAT)), _WHY_MANY),
    _Claim("Figure 5.14, no sharing", "throughput", _TIMES, 1.0, lambda runs: runs.gain(_UNSHARED),
           "the text says that it matches", quick=True),
    *(
        _Claim("Policies, default load", f"{policy}, throughput", _TIMES, paper,
               partial(Runs.gain, load=_DEFAULT, policy=policy), why)
        for policy, paper, why in (
            ("bandit", 4.0, _WHY_LEARNED),
            ("q_learning", 4.0, _WHY_LEARNED),
            ("greedy", None, "never stops; not in the paper"),
            (PRODUCTION, None, "heuristic with a bound of 2 s on waiting and a guard; not in the paper"),
        )
    ),
)  # fmt: skip


def run(progress: Progress, *, quick: bool, simulated: Simulated = simulate) -> list[Cell]:
    """quick: few cells, arrivals for ten seconds."""
    seconds = _QUICK_SECONDS if quick else _SECONDS
    all_runs = [Runs(locality, seconds, _LEARNING_SECONDS, progress, simulated) for locality in LOCALITIES]
    return [claim.of(runs) for claim in _CLAIMS if claim.quick or not quick for runs in all_runs]


def _told(load: Load) -> str:
    return (
        f"{load.model}, {load.groups} groups, {load.shared_tokens} shared and {load.decode_tokens} decode tokens, "
        f"{load.rate:g}/s"
    )
