"""Fresh processes, which have imported torch and done nothing else."""

import multiprocessing
import sys
import traceback

CONTEXT = multiprocessing.get_context("forkserver")
GPU = [name for name in sys.modules if name == "simulated_gpu.plugin"]
CONTEXT.set_forkserver_preload([*GPU, "torch", "torch_lla_em"])


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
