"""`sparkgap cache`: what lies in the cache directory, and clearing what can be made again."""

from typing import Annotated, Any

import typer

from sparkgap.cli.console import format_bytes, print_json, use_utf8_output, write_text
from sparkgap.cli.interrupts import ending_at_once
from sparkgap.errors import DownloadError


def cache(
    clear: Annotated[
        bool, typer.Option("--clear", help="Remove packed weights; they are made again when a model is loaded.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Report as one JSON object.")] = False,
) -> None:
    """Show the cache directory: downloaded models, and weights packed for faster starts.

    Packed weights are kept below `packed` whenever a model of some size is loaded for the CPU's kernels. A downloaded
    model is removed by removing its directory.
    """
    use_utf8_output()
    with ending_at_once():
        from sparkgap.catalog.packed_files import packed_directory, packed_files
        from sparkgap.catalog.store import cache_root
    removed_bytes = 0
    if clear:
        for path in packed_files():
            size_bytes = path.stat().st_size
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise DownloadError(f"cannot remove {path}: {error.strerror}; check its permissions") from error
            removed_bytes += size_bytes
    packed: list[dict[str, Any]] = [{"path": str(path), "size_bytes": path.stat().st_size} for path in packed_files()]
    facts: dict[str, Any] = {
        "directory": str(cache_root()),
        "models": cached_models(),
        "packed": packed,
        "packed_bytes": sum(file["size_bytes"] for file in packed),
        "removed_bytes": removed_bytes,
    }
    if as_json:
        print_json(facts)
        return
    entries = [*facts["models"], *packed]
    for entry in entries:
        write_text(f"{entry['path']}  {format_bytes(entry['size_bytes'])}\n")
    if len(entries) > 1:
        write_text(f"{facts['directory']}  {format_bytes(sum(entry['size_bytes'] for entry in entries))} in all\n")
    if clear:
        write_text(f"removed {format_bytes(removed_bytes)} of packed weights from {packed_directory()}\n")
    elif not entries:
        write_text(f"nothing in {facts['directory']}\n")


def cached_models() -> list[dict[str, Any]]:
    """Name, path and size in bytes of each downloaded model."""
    from sparkgap.catalog.files import directory_bytes
    from sparkgap.catalog.store import ModelStore

    store = ModelStore()
    return [
        {"name": name, "path": str(path), "size_bytes": directory_bytes(path)}
        for name in store.folders()
        if (path := store.find(name)) is not None
    ]
