"""The command line: `mixle plugins`, `explain`, `verify`, and added commands. Exit 0 as asked, 1 found wrong, 2 bad input."""

from __future__ import annotations

import logging
import os
import sys
import traceback

from mixle_core.errors import MixleError

DEBUG = "MIXLE_DEBUG"
"""Set in the environment, errors show their traceback."""


def main() -> None:
    """Entry point of `mixle`: runs a command; a user's mistake is one message and exit code 2, without a traceback."""
    try:
        import click
        import rich  # noqa: F401 - the tables need it
    except ImportError as error:
        print(f"mixle: {error.name} is missing; pip install 'mixle-core[cli]'", file=sys.stderr)
        sys.exit(2)
    import structlog

    from mixle_core.cli.commands import cli

    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO), logger_factory=structlog.PrintLoggerFactory(sys.stderr)
    )
    try:
        status = cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(getattr(error, "code", error.exit_code))
    except click.Abort:
        sys.exit(130)
    except MixleError as error:
        _fail(str(error), 2)
    except Exception as error:  # a bug of ours or of a library: the line names it, the traceback is one variable away
        _fail(f"{type(error).__name__}: {error}", 1)
    else:
        sys.exit(status if isinstance(status, int) else 0)


def _fail(text: str, code: int) -> None:
    from mixle_core.runtime.launch import is_rank, leave_error

    if os.environ.get(DEBUG):
        traceback.print_exc()
    if not (is_rank() and leave_error(text)):
        print(f"mixle: {text}" + ("" if code == 2 or os.environ.get(DEBUG) else f"\n({DEBUG}=1 shows the traceback)"), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code) if is_rank() else sys.exit(code)
