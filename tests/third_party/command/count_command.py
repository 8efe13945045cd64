"""`reknit count`: count the numbers in a checkpoint."""

from math import prod

import reknit


def add_parser(commands):
    parser = commands.add_parser("count", help="count the numbers in a checkpoint")
    parser.add_argument("path", help="a checkpoint: a folder or URL")
    parser.set_defaults(run=run)


def run(args):
    with reknit.open(args.path) as checkpoint:
        specs = [spec for tensors in checkpoint.tensors.values() for spec in tensors.values()]
    print(sum(prod(spec.shape) for spec in specs))
    return 0
