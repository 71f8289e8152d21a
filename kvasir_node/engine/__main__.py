"""``python -m kvasir_node.engine --role ROLE --control-fd FD --directory DIR``: one engine process.

Ctrl-C and the end of the terminal go to the whole terminal group; control decides what they mean and ends its
engines itself. So an engine ignores both before it imports anything else, which takes most of a second.
"""

import os
import signal
import sys

if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    from kvasir_node.engine.process import main

    status = main(sys.argv[1:])
    # Threads may still sit in llama.cpp or in a socket; nothing of theirs is worth waiting for.
    sys.stderr.flush()
    os._exit(status)
