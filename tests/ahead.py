"""An interpreter that has imported torch and transformers; commands start as forks of it and import mixle themselves.

`serve` listens on a socket in a directory, where it leaves a program named `python`. That one passes its arguments, variables, directory
and open files on, and ends as the fork ends. What it cannot start this way, such as pip and pytest, it starts as Python would.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

AHEAD = ("torch.distributed.fsdp", "torch.distributed.launcher.api", "transformers.models.qwen3.modeling_qwen3")
WITHOUT = ("pip", "pytest", "torch.distributed.run")
"""Modules that Python itself runs, with everything that they start: some ranks of the pages have interpreters of their own."""

PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys
real, arguments = {python!r}, sys.argv[1:]
rest = arguments[arguments[:1] == ["-u"]:]
if not rest or rest[0].startswith("-") and (rest[0] != "-m" or rest[1] in {without}):
    os.execv(real, [real, *arguments])
server = socket.socket(socket.AF_UNIX)
server.connect({socket!r})
call = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [len(call).to_bytes(8, "big")], [0, 1, 2])
server.sendall(call)
pid = int.from_bytes(server.recv(8), "big")
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
said = server.recv(8)
code = int.from_bytes(said, "big", signed=True) if said else 1
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Path]:
    """The path of a program that stands for `python`, while the interpreter behind it runs."""
    program = folder / "python"
    process = subprocess.Popen([sys.executable, __file__, str(folder)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", "the interpreter did not start"
        yield program
    finally:
        process.kill()
        process.wait()


def serve(folder: Path) -> None:
    """Until killed."""
    for module in AHEAD:
        with contextlib.suppress(ImportError):  # an environment without transformers does without
            importlib.import_module(module)
    assert threading.active_count() == 1, "a fork has one thread"
    program, path = folder / "python", str(folder / "socket")
    program.write_text(PROGRAM.format(python=sys.executable, socket=path, without=WITHOUT))
    program.chmod(0o755)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    gc.freeze()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            continue
        listener.close()
        _attend(connection, str(program))


def _attend(connection: socket.socket, program: str) -> None:
    """Start one program, tell how it ends, and end it when nobody waits for it any more."""
    length, files, _, _ = socket.recv_fds(connection, 8, 3)
    size, call = int.from_bytes(length, "big"), b""
    while len(call) < size:
        call += connection.recv(size - len(call))
    pid = os.fork()
    if pid == 0:
        connection.close()
        _become(program, files, *json.loads(call))
    for file in files:
        os.close(file)
    for file in (0, 1, 2):
        os.close(file)
    connection.sendall(pid.to_bytes(8, "big"))
    connection.settimeout(0.0)
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        with contextlib.suppress(BlockingIOError):
            if not connection.recv(1):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    with contextlib.suppress(OSError):
        connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))
    os._exit(0)


def _become(program: str, files: list[int], arguments: list[str], env: dict[str, str], directory: str) -> None:
    """What `python ARGUMENTS` does after its start."""
    import torch

    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0)))
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w")), write_through="-u" in arguments)
    sys.stderr = io.TextIOWrapper(io.BufferedWriter(io.FileIO(2, "w")), errors="backslashreplace", line_buffering=True)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.executable, sys.orig_argv = program, [program, *arguments]
    rest = arguments[1:] if arguments[0] == "-u" else arguments
    sys.path[0:1] = [] if sys.path[0] == str(Path(__file__).parent) else sys.path[0:1]
    sys.path[:0] = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    importlib.invalidate_caches()
    code = _run(rest)
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _run(arguments: list[str]) -> int:
    kind, *rest = arguments
    try:
        if kind == "-m":
            sys.path.insert(0, str(Path.cwd()))
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(kind).resolve().parent))
            sys.argv = arguments
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        return _exit_code(end.code)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        return 1
    return 0


def _exit_code(code: Any) -> int:
    if code is None or isinstance(code, int):
        return int(code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
