"""How likely what is known of an open session's prompt is in its final one: learned from the updates seen. Pure.

A version of a prompt lies between two inputs. One that ended before a step was planned counts nothing, since nothing of
it could have been computed: what it lost is added to the version before. A version ends by an update with others after
it, by the last update, or by `finish`, which keeps all. An update keeps what lies before the first token that differs:
by depth, as a share of the prompt, since lists of documents are replaced as a whole.

A session is told from its client, and a client from the service: what the wider has seen counts as much as a few
versions. Before anything was seen everything is believed to stay. Sums are by tokens, so that a short prompt before the
first list says little, and fade with each version after them.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

# Parts of a prompt that are told apart.
DEPTHS = 16
# As many versions of its own as what the wider has seen counts for.
PRIOR_VERSIONS = 2.0
# What is left of a version with each one after it: about the last hundred count.
KEEP = 0.99
MOST_CLIENTS = 1024


class Slice(NamedTuple):
    """Tokens of a prompt one after the other, and how likely each of them is in the final prompt."""

    tokens: int
    survival: float


class _Ending(IntEnum):
    """How a version ended: by `finish`, by the last update, by an update before others."""

    CLOSED = 0
    LAST = 1
    FOLLOWED = 2


@dataclass(frozen=True, slots=True)
class _Belief:
    """endings: how likely each is. kept: by depth, how likely an update keeps it."""

    endings: tuple[float, ...]
    kept: tuple[float, ...]

    def survival(self) -> tuple[float, ...]:
        """By depth: in the final prompt, after any number of updates, each of which keeps it or not."""
        closed, last, followed = self.endings
        return tuple((closed + last * kept) / max(1 - followed * kept, closed + last) for kept in self.kept)


_ALL_STAYS = _Belief((1.0, 0.0, 0.0), (1.0,) * DEPTHS)


@dataclass(slots=True)
class _Seen:
    """Fading sums over versions, in tokens: by ending, and by depth what updates kept."""

    ended: list[float] = field(default_factory=lambda: [0.0] * len(_Ending))
    kept: list[float] = field(default_factory=lambda: [0.0] * DEPTHS)

    def add(self, ending: _Ending, tokens: int, kept_tokens: int) -> None:
        self.ended = [KEEP * each for each in self.ended]
        self.ended[ending] += tokens
        self.kept = [KEEP * each for each in self.kept]
        if ending is not _Ending.CLOSED:
            depth = DEPTHS * kept_tokens / max(1, tokens)
            for index in range(DEPTHS):
                self.kept[index] += tokens * min(1.0, max(0.0, depth - index))

    def belief(self, wider: _Belief, prior_tokens: float) -> _Belief:
        """With what the wider has seen as if so many tokens of it were this one's."""
        seen = sum(self.ended) + prior_tokens
        updated = self.ended[_Ending.LAST] + self.ended[_Ending.FOLLOWED] + prior_tokens
        return _Belief(
            tuple((own + prior_tokens * each) / seen for own, each in zip(self.ended, wider.endings, strict=True)),
            tuple((own + prior_tokens * each) / updated for own, each in zip(self.kept, wider.kept, strict=True)),
        )


@dataclass(slots=True)
class _Session:
    client: str
    known_tokens: int
    # The plan before which its version began.
    since: int
    seen: _Seen = field(default_factory=_Seen)
    # By depth.
    survival: tuple[float, ...] = _ALL_STAYS.kept
    # Of the version that was computable before this one: its tokens, and what is left of them.
    before: tuple[int, int] | None = None


class SurvivalEstimates:
    """Of the open sessions of one scheduler that may be updated."""

    def __init__(self) -> None:
        self._plans = 0
        self._sessions: dict[str, _Session] = {}
        # The least recently used first.
        self._clients: OrderedDict[str, _Seen] = OrderedDict()
        self._all = _Seen()

    def planned(self) -> None:
        """A step is planned: what is known now could be computed in it."""
        self._plans += 1

    def opened(self, name: str, client: str, known_tokens: int) -> None:
        session = self._sessions[name] = _Session(client, known_tokens, self._plans)
        session.survival = self._survival(session)

    def updated(self, name: str, kept_tokens: int, known_tokens: int) -> None:
        """An input left so many tokens of the prompt, which has `known_tokens` now. Sessions that it does not know are
        ignored."""
        session = self._sessions.get(name)
        if session is None:
            return
        if session.since < self._plans:
            if session.before is not None:
                self._learn(session, _Ending.FOLLOWED, *session.before)
            session.before = (session.known_tokens, kept_tokens)
        elif session.before is not None:
            session.before = (session.before[0], min(session.before[1], kept_tokens))
        session.known_tokens, session.since = known_tokens, self._plans
        session.survival = self._survival(session)

    def closed(self, name: str) -> None:
        """Its prompt is final. Sessions that it does not know are ignored."""
        session = self._sessions.pop(name, None)
        if session is None:
            return
        is_computable = session.since < self._plans
        if session.before is not None:
            self._learn(session, _Ending.FOLLOWED if is_computable else _Ending.LAST, *session.before)
        if is_computable:
            self._learn(session, _Ending.CLOSED, session.known_tokens, session.known_tokens)

    def forget(self, name: str) -> None:
        """It ended without a final prompt."""
        self._sessions.pop(name, None)

    def survival(self, name: str, first: int) -> float:
        """Of the token there. What is not known to be updated is believed to stay."""
        session = self._sessions.get(name)
        if session is None:
            return 1.0
        return session.survival[min(DEPTHS - 1, DEPTHS * first // max(1, session.known_tokens))]

    def slices(self, name: str, first: int, tokens: int) -> Sequence[Slice]:
        """Of so many tokens from the first one on; see `survival`."""
        session = self._sessions.get(name)
        if session is None:
            return (Slice(tokens, 1.0),)
        found, end = [], first + tokens
        for index, survival in enumerate(session.survival):
            upper = session.known_tokens * (index + 1) // DEPTHS if index < DEPTHS - 1 else end
            if upper > first:
                found.append(Slice(min(upper, end) - first, survival))
                first = upper
            if first >= end:
                break
        return found

    def check_invariants(self) -> None:
        assert len(self._clients) <= MOST_CLIENTS
        for each in (self._all, *self._clients.values(), *(session.seen for session in self._sessions.values())):
            updated = each.ended[_Ending.LAST] + each.ended[_Ending.FOLLOWED]
            assert min(each.ended) >= 0
            assert all(0 <= kept <= updated * (1 + 1e-9) for kept in each.kept)
            assert sorted(each.kept, reverse=True) == each.kept, "what is deeper survives no longer"

    def _learn(self, session: _Session, ending: _Ending, tokens: int, kept_tokens: int) -> None:
        client = self._clients.setdefault(session.client, _Seen())
        self._clients.move_to_end(session.client)
        if len(self._clients) > MOST_CLIENTS:
            self._clients.popitem(last=False)
        for seen in (session.seen, client, self._all):
            seen.add(ending, tokens, kept_tokens)

    def _survival(self, session: _Session) -> tuple[float, ...]:
        prior_tokens = PRIOR_VERSIONS * max(1, session.known_tokens)
        belief = self._all.belief(_ALL_STAYS, prior_tokens)
        client = self._clients.get(session.client)
        if client is not None:
            belief = client.belief(belief, prior_tokens)
        # How its version ends says the client: a session has one end.
        own = session.seen.belief(belief, prior_tokens)
        return _Belief(belief.endings, own.kept).survival()
