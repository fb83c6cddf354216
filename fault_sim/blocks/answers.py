"""How stand-ins for engines end an answer, and what they say of its tokens. Tokens are characters."""

from cluster_core.engine_jobs import FinishReason, PositionLogprobs, SamplingSpec, TokenLogprob


def ending(text: str, token: int, position: int, sampling: SamplingSpec) -> tuple[str, FinishReason | None]:
    """The text without what ends it, and why the job ends here, if it does."""
    found = [place for place in (text.find(stop) for stop in sampling.stop) if place >= 0]
    if found:
        return text[: min(found)], FinishReason.STOP
    if token in sampling.stop_token_ids and position + 1 >= sampling.min_tokens:
        return text[:-1], FinishReason.STOP
    return text, FinishReason.LENGTH if position + 1 == sampling.max_tokens else None


def held_back(sampling: SamplingSpec) -> int:
    """Characters at the end of the text that may be the beginning of a stop string."""
    return max((len(stop) for stop in sampling.stop), default=1) - 1


def logprobs(tokens: tuple[int, ...], count: int | None) -> tuple[PositionLogprobs, ...]:
    """As many alternatives as `count` says, with made-up values."""
    if count is None:
        return ()
    top = range(count)
    return tuple(
        PositionLogprobs(
            TokenLogprob(token, -0.5, 1),
            tuple(TokenLogprob(token + rank, -0.5 * (rank + 1), rank + 1) for rank in top),
        )
        for token in tokens
    )
