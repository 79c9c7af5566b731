"""Processes of their own: scripts, and functions after nothing but the import of torch."""

import multiprocessing
import os
import subprocess
import sys
import traceback

CONTEXT = multiprocessing.get_context("forkserver")
GPU = [name for name in sys.modules if name == "simulated_gpu.plugin"]
CONTEXT.set_forkserver_preload([*GPU, "torch", "torch_lla_em"])


def run_python(*arguments, cwd=None, **variables):
    """Run Python with the path of this process; return what it prints."""
    path = {"PYTHONPATH": os.pathsep.join(sys.path), "MPLBACKEND": "Agg"}
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, **path, **variables}
    streams = {"capture_output": True, "text": True}
    done = subprocess.run(command, cwd=cwd, env=environment, timeout=280, **streams)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def run_fresh(function, *arguments, timeout=120):
    """Run a module's function in a fresh process; raise its error as text."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_work, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        told = receiver.recv() if receiver.poll(timeout) else "It did not end in time."
    except EOFError:
        told = "It died."
    process.kill()
    process.join()
    assert told is None, told


def _work(sender, function, arguments):
    try:
        function(*arguments)
        sender.send(None)
    except BaseException:
        sender.send(traceback.format_exc())
