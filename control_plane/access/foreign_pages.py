"""Whether a browser says that somebody else's page has it ask: by two headers alone. Pure.

    Origin           where there is one, that of the address that is asked
    Sec-Fetch-Site   where there is one, `same-origin` or `none`

A browser shows its certificate whichever page has it ask, and opens WebSockets without asking first. Callers that are
no browsers say nothing of either.
"""

from collections.abc import Mapping


def refusal_of_page(headers: Mapping[str, str]) -> str:
    """Why it is not answered, in a sentence; empty where it is. headers: names in lower case."""
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host", ""):
        return f"the page of another origin, `{origin[:80]}`, may not call this service"
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return "the page of another site may not call this service"
    return ""
