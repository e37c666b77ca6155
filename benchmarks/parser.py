"""The output parser: megabytes of model output a second, and the memory that a long value takes.

    python -m benchmarks.parser speed               # text and ids, in small and large pieces
    python -m benchmarks.parser memory              # a long argument, long reasoning, long content
    python -m benchmarks.parser hostile             # what makes a careless parser quadratic

No model runs; ids are those of the byte tokenizer, one for every byte. Times are CPU time of one thread.
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc

from k3lib.server.chat import OutputParser
from k3lib.server.tokenizer import load_tokenizer

TOK = load_tokenizer()
PROSE = "The quick brown fox jumps over 13 lazy dogs, and then it rests.\n"
CODE = '<p class="x">if a < b && c > "d": return [\'\\n\']</p>\n'
TOOLS = '<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
END = "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"


def argument(kind: str) -> str:
    return f'{TOOLS}<|open|>argument key="a" type="{kind}"<|sep|>'


def play(output: str | list[int], size: int, *, keeps_text: bool = False) -> float:
    """Seconds to parse an output that comes in pieces of that size."""
    parser = OutputParser(tok=TOK, keeps_text=keeps_text)
    feed = parser.feed if isinstance(output, str) else parser.feed_ids
    parts = [output[at : at + size] for at in range(0, len(output), size)]
    gc.collect()
    start = time.thread_time()
    for part in parts:
        feed(part)
    parser.finish()
    return time.thread_time() - start


def speed(args: argparse.Namespace) -> None:
    """Print megabytes a second by kind of output and size of the pieces; the best of some rounds."""
    count = int(args.megabytes * 1e6)
    outputs = {
        "reasoning": PROSE * (count // len(PROSE)),
        "code in content": "<|close|>think<|sep|><|open|>response<|sep|>" + CODE * (count // len(CODE)),
        "prose in a string": argument("string") + PROSE * (count // len(PROSE)) + END,
        "code in a string": argument("string") + CODE * (count // len(CODE)) + END,
        "other value": argument("array") + "[" + "12, " * (count // 4) + "0]" + END,
    }
    modes = [("text", size) for size in (4, 16, 4096)] + [("ids", size) for size in (1, 4, 16, 4096)]
    print(f"MB/s, {args.megabytes} MB, best of {args.rounds}, keeps_text={args.keeps_text}")
    print(f"{'':<20}" + "".join(f"{f'{mode} by {size}':>14}" for mode, size in modes))
    for name, text in outputs.items():
        row = []
        for mode, size in modes:
            output = text if mode == "text" else TOK.encode(text, allow_special=True)
            seconds = min(play(output, size, keeps_text=args.keeps_text) for _ in range(args.rounds))
            row.append(len(text) / 1e6 / seconds)
        print(f"{name:<20}" + "".join(f"{rate:>14.2f}" for rate in row))


def memory(args: argparse.Namespace) -> None:
    """Print the peak of the heap in megabytes while a long output comes in ids, 16 at a time."""
    openers = {
        "reasoning": "",
        "content": "<|close|>think<|sep|><|open|>response<|sep|>",
        "a string argument": argument("string"),
        "another argument": argument("array"),
    }
    print(f"{args.megabytes} MB of text, 16 ids at a time: peak in MB")
    print(f"{'':<20}{'deltas only':>14}{'keeps_text':>14}")
    for name, opener in openers.items():
        peaks = []
        for keeps_text in (False, True):
            parser = OutputParser(tok=TOK, keeps_text=keeps_text)
            parser.feed_ids(TOK.encode(opener, allow_special=True))
            some = [97] * 16
            gc.collect()
            tracemalloc.start()
            for _ in range(int(args.megabytes * 1e6 / 16)):
                parser.feed_ids(some)
            peaks.append(tracemalloc.get_traced_memory()[1] / 1e6)
            tracemalloc.stop()
        print(f"{name:<20}{peaks[0]:>14.3f}{peaks[1]:>14.3f}")


def hostile(args: argparse.Namespace) -> None:
    """Print microseconds a repetition of the starts of markers, and how they grow with ten times as many."""
    openers = {"in reasoning": "", "in a string": argument("string"), "in an opener": TOOLS + "<|open|>call "}
    units = ("<|", "<|open", "<|open|>", "<|close|>response", "<|open|>call ", "<|sep|>", " ")
    few, many = args.repeats // 10, args.repeats
    print(f"microseconds a repetition, {many} of them, and against {few}")
    print(f"{'':<34}{'text, whole':>18}{'text by 16':>18}{'ids by 1':>18}")
    for where, opener in openers.items():
        for unit in units:
            row = []
            for mode, size in (("text", 0), ("text", 16), ("ids", 1)):
                costs = []
                for count in (few, many):
                    text = opener + unit * count
                    output = text if mode == "text" else TOK.encode(text, allow_special=True)
                    costs.append(play(output, size or len(output), keeps_text=True) / count * 1e6)
                row.append(f"{costs[1]:.2f} ({costs[1] / costs[0]:.1f}x)")
            print(f"{where:<14}{unit!r:<20}" + "".join(f"{cell:>18}" for cell in row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("speed", help=speed.__doc__)
    command.add_argument("--megabytes", type=float, default=0.5)
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--keeps-text", action="store_true", help="as a request that is not streamed")
    command.set_defaults(run=speed)
    command = commands.add_parser("memory", help=memory.__doc__)
    command.add_argument("--megabytes", type=float, default=5)
    command.set_defaults(run=memory)
    command = commands.add_parser("hostile", help=hostile.__doc__)
    command.add_argument("--repeats", type=int, default=100_000)
    command.set_defaults(run=hostile)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
