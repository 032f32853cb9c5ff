"""Another build of the native module than the installed one, for every process that tests start.

Python imports this by itself where this directory is in PYTHONPATH, as `make test-sanitize` has it.
"""

import importlib.util
import os
import sys

if path := os.environ.get("SPARKGAP_NATIVE_MODULE"):
    spec = importlib.util.spec_from_file_location("sparkgap._native", path)
    assert spec is not None
    assert spec.loader is not None
    try:
        sys.modules["sparkgap._native"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["sparkgap._native"])
    except ImportError as error:
        # Of other errors Python only tells, and the tests would go on with the installed module.
        raise SystemExit(f"the native module in SPARKGAP_NATIVE_MODULE cannot be loaded: {error}") from error
