"""When a fit saves, and where it goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mixle_core import UsageError
from mixle_core.runtime import SaveHandle, Session, newest_step
from mixle_lm.loader import RowLoader
from mixle_lm.rows import require_whole

AUTO = "auto"

_BEGAN = "updates before the run"


class Saving:
    """The checkpoints of one fit.

    Args:
        save_to, save_every, keep, resume: as in `LM.fit`.

    Raises:
        UsageError: options that need another.
    """

    def __init__(self, save_to: str | Path | None, save_every: int | None, keep: int | None, resume: str | Path | None) -> None:
        for name, value in (("save_every", save_every), ("keep", keep)):
            if value is not None:
                require_whole(name, value)
                if save_to is None:
                    raise UsageError(f"{name}={value} without a directory; give save_to, where the steps go")
        if resume == AUTO and save_to is None:
            raise UsageError('resume="auto" without a directory; give save_to, whose newest step it goes on from')
        self._root, self._every, self._keep, self._resume = save_to, save_every, keep, resume
        self._under_way: SaveHandle | None = None
        self._last: tuple[int, Path] | None = None
        self._began = 0

    def resumed(self, session: Session, loader: RowLoader) -> int | None:
        """Load if told to; the updates that the run had before. Collective.

        Raises:
            UsageError: steps lie where this run is going to write.
        """
        self._began = session.update  # updates of fits before this run are not its own
        before = self._loaded(session, loader)
        if self._root is not None:
            self._require_ahead(session)
        return before

    def _require_ahead(self, session: Session) -> None:
        """A committed step is never written again: better said now than at the first save."""
        highest = session.reduction.mesh.gather_objects(newest_step(str(self._root)) or 0)[0]
        if highest > session.update:
            raise UsageError(
                f"save_to={str(self._root)!r} has a step {highest} already, and this fit begins after update {session.update}; go on "
                'from it with resume="auto", or save to another directory'
            )

    def _loaded(self, session: Session, loader: RowLoader) -> int | None:
        if self._resume is None:
            return None
        auto = self._resume == AUTO
        root = self._root if auto else self._resume
        assert root is not None
        loaded = session.load(root, state={"loader": loader}, missing_ok=auto)
        if loaded is None:
            return None
        if self._root is not None and loaded.path.parent.resolve() == Path(self._root).resolve():
            self._last = loaded.step, loaded.path
        said = loaded.metadata if isinstance(loaded.metadata, dict) else {}
        self._began = int(said.get(_BEGAN, 0))
        return max(0, loaded.step - self._began)

    def after(self, session: Session, loader: RowLoader) -> None:
        """Save when it is the turn of this update. Collective."""
        if self._every is not None and session.update % self._every == 0:
            self._settle()
            handle = session.save(self._where(), asynchronous=True, **self._what(loader))
            assert isinstance(handle, SaveHandle)
            self._under_way = handle

    def finish(self, session: Session, loader: RowLoader) -> Path | None:
        """The step that holds the last update, saved now if it is not yet. Collective."""
        self._settle()
        if self._root is None:
            return None
        if self._last is None or self._last[0] != session.update:
            path = session.save(self._where(), **self._what(loader))
            assert isinstance(path, Path)
            self._last = session.update, path
        return self._last[1]

    def _settle(self) -> None:
        if self._under_way is not None:
            handle, self._under_way = self._under_way, None
            self._last = handle.step, handle.wait()

    def _where(self) -> str | Path:
        assert self._root is not None
        return self._root

    def _what(self, loader: RowLoader) -> dict[str, Any]:
        return {"state": {"loader": loader}, "keep": self._keep, "metadata": {_BEGAN: self._began}}
