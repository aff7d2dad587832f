"""Adds pages to the site: root pages, results of benchmarks, examples, and public names.

Links to these files are written for readers of the source; the hooks turn them into links to pages.
"""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "src")]
import reference_index  # noqa: E402 (a module beside this one)

LANGUAGES = {".py": "python", ".sbatch": "bash", ".yaml": "yaml"}
ROOT_PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
RESULTS = "benchmarks/results/README.md"


def on_files(files: Files, config: Any) -> Files:
    for name in ROOT_PAGES:
        text = (ROOT / name).read_text().replace("](docs/", "](")
        for other in ROOT_PAGES:
            text = text.replace(f"]({other})", f"]({other.lower()})")
        files.append(File.generated(config, name.lower(), content=text))
    results = (ROOT / RESULTS).read_text().replace("](../../docs/", "](")
    files.append(File.generated(config, "results.md", content=results))
    for path in sorted((ROOT / "examples").rglob("*.*")):
        language = LANGUAGES[path.suffix]
        text = f"# {path.name}\n\n```{language}\n{path.read_text()}```\n"
        files.append(File.generated(config, f"examples/{path.stem}.md", content=text))
    for name, text in reference_index.pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == reference_index.PAGE.name:
        markdown = reference_index.with_signatures(markdown)
    for name in ROOT_PAGES:
        markdown = markdown.replace(f"](../{name})", f"]({name.lower()})")
    markdown = markdown.replace(f"](../{RESULTS}", "](results.md")
    return re.sub(r"\]\(\.\./examples/(?:cluster/)?(\w+)\.\w+\)", r"](examples/\1.md)", markdown)
