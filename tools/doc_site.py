"""The site's hook for MkDocs: links of the documents become links of the site, or paths of the project.

Documents are written to be read in the project: they link to source files, and to documents that do not lie in `docs`.
On the site those documents are pages too (`ELSEWHERE`), pictures are copied, and a link to any other file becomes the
file's path. Links within code stay as they are.
"""

import posixpath
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
# Documents that lie elsewhere, by the page that each becomes.
ELSEWHERE = {
    "contribute/architecture.md": "ARCHITECTURE.md",
    "contribute/contributing.md": "CONTRIBUTING.md",
    "contribute/changelog.md": "CHANGELOG.md",
    "contribute/builtin-model.md": "builtin_model/README.md",
    "contribute/cost-models.md": "cluster_sim/cost_models/README.md",
    "operate/reporting.md": "SECURITY.md",
    "how/papers-stream2llm.md": "benchmarks/results/papers-stream2llm.md",
    "how/papers-feather.md": "benchmarks/results/papers-feather.md",
    "how/papers-hotprefix.md": "benchmarks/results/papers-hotprefix.md",
}
# Where pictures of `benchmarks/results` lie on the site.
PICTURES = "pictures"

# A fenced or an indented block, or code in a sentence; or a link, as `![text](target)`.
_CODE_OR_LINK = re.compile(
    r"(?P<code>^```.*?^```|^(?:    [^\n]*\n)+|`(?:[^`\n]|\n(?![\n|]))+`)"
    r"|(?P<image>!?)\[(?P<text>(?:`[^`]*`|[^\]`])*)\]\(\s*(?P<target>[^)\s]+)\)",
    re.DOTALL | re.MULTILINE,
)


@cache
def pages() -> dict[str, str]:
    """Every page and picture of the site by its path in the project."""
    own = {str(path.relative_to(ROOT)): str(path.relative_to(DOCS)) for path in DOCS.rglob("*") if path.is_file()}
    pictures = {f"benchmarks/results/{path.name}": f"{PICTURES}/{path.name}" for path in _pictures()}
    return own | {path: page for page, path in ELSEWHERE.items()} | pictures


def rewritten(text: str, page: str, known: Mapping[str, str]) -> str:
    """The document with the links of the site. page: where it lies there. known: as of `pages`.

    Raises ValueError for a link that leads nowhere in the project.
    """
    folder = posixpath.dirname(ELSEWHERE.get(page, f"docs/{page}"))

    def replaced(found: re.Match[str]) -> str:
        if found["code"] is not None or "://" in found["target"] or found["target"].startswith(("#", "mailto:")):
            return found[0]
        path, hash_sign, anchor = found["target"].partition("#")
        within = posixpath.normpath(posixpath.join(folder, path))
        if within in known:
            target = posixpath.relpath(known[within], posixpath.dirname(page) or ".")
            return f"{found['image']}[{found['text']}]({target}{hash_sign}{anchor})"
        if not (ROOT / within).exists():
            raise ValueError(f"{page}: a link to {found['target']}, which does not exist")
        return _as_path(found["text"], within)

    return _CODE_OR_LINK.sub(replaced, text)


def _as_path(text: str, path: str) -> str:
    """What is left of a link to a file that is no page."""
    named = text.strip("`")
    return f"`{path}`" if path.endswith(named) else f"{text} (`{path}`)"


def _pictures() -> list[Path]:
    return sorted((ROOT / "benchmarks" / "results").glob("*.png"))


def on_files(files: Any, *, config: Any) -> Any:
    """Called by MkDocs once it has found the files of `docs`."""
    from mkdocs.structure.files import File

    # While the site is served, a file may have come since.
    pages.cache_clear()
    for page, path in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    for picture in _pictures():
        files.append(File.generated(config, f"{PICTURES}/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Called by MkDocs before a page is rendered."""
    from mkdocs.exceptions import PluginError

    try:
        return rewritten(markdown, page.file.src_uri, pages())
    except ValueError as error:
        raise PluginError(str(error)) from None
