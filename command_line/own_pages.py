"""Pages of the service's own places, read over HTTP: whoever is there, with a bound on time and size."""

import http.client
import ssl
import urllib.request

from rachis.metadata_channel import key_metadata

from cluster_core.bounded_read import read_within

TIMEOUT_S = 5.0
_MOST_PAGE_BYTES = 64 << 20
# Of a page: it is not reached, is none, or has a URL that is none.
UNREAD = (OSError, ValueError, http.client.HTTPException)


def page_of(url: str, timeout_s: float = TIMEOUT_S, api_key: str = "") -> str:
    """Raises one of `UNREAD`."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(
        # Whatever proxy the environment names: these are the service's own places.
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(context=context),
    )
    headers = dict(key_metadata(api_key))
    with opener.open(urllib.request.Request(url, headers=headers), timeout=timeout_s) as response:
        return read_within(response.read1, _MOST_PAGE_BYTES, timeout_s).decode(errors="replace")
