"""`python -m kvasir_node`: the same command line as the `kvasir-node` script.

Apart from `kvasir_node.cli` so that the package can be run without being installed as a
script. It decides nothing and parses nothing.
"""

from kvasir_node.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
