"""`sparkgap pull`: fetch a model before it is needed."""

from typing import Annotated

import typer

from sparkgap.cli.console import DownloadProgress, format_bytes, print_json, use_utf8_output, write_text
from sparkgap.errors import ModelNotFoundError


def pull(
    name: Annotated[str, typer.Argument(help="Catalog name or hf:owner/name.", show_default=False)],
    verify: Annotated[
        bool, typer.Option("--verify", help="Recompute the checksums of a model that is already here.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Report as one JSON object.")] = False,
) -> None:
    """Download a model into the cache, and check it."""
    use_utf8_output()
    from sparkgap.catalog.files import directory_bytes
    from sparkgap.catalog.resolve import resolve
    from sparkgap.catalog.store import cache_root

    path = resolve(name, progress=DownloadProgress(), verify=verify)
    if not path.is_relative_to(cache_root()):
        raise ModelNotFoundError(f"{name} is a path, nothing to pull; give a catalog name or hf:owner/name")
    size_bytes = directory_bytes(path) if path.is_dir() else path.stat().st_size
    if as_json:
        print_json({"model": name, "path": str(path), "size_bytes": size_bytes, "verified": verify})
    else:
        write_text(f"{name}: {path} ({format_bytes(size_bytes)}{', checksums verified' if verify else ''})\n")
