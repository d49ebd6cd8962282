"""Applies one mutation of a cases file to a tree: apply.py CASES NAME TREE.

A case is `case NAME`, `invariants ...`, a `test ...` where the simulator cannot notice, and one or more
changes: `file PATH`, then between `<<<` and `===` a text that must stand in the file exactly once, and
between `===` and `>>>` what replaces it. Prints the files it has changed.
"""

import pathlib
import sys


def changes(chunk):
    """The changes of one case, as (file, old, new)."""
    file = None
    lines = iter(chunk.splitlines())
    for line in lines:
        if line.startswith("file "):
            file = line.split(" ", 1)[1]
        elif line == "<<<":
            old, new = [], []
            for part in lines:
                if part == "===":
                    break
                old.append(part)
            for part in lines:
                if part == ">>>":
                    break
                new.append(part)
            yield file, "\n".join(old), "\n".join(new)


def main():
    path, name, tree = sys.argv[1:]
    for chunk in ("\n" + pathlib.Path(path).read_text()).split("\ncase ")[1:]:
        if chunk.splitlines()[0].strip() != name:
            continue
        for file, old, new in changes(chunk):
            target = pathlib.Path(tree) / file
            source = target.read_text()
            if source.count(old) != 1:
                sys.exit(f"{name}: the text stands {source.count(old)} times in {file}")
            target.write_text(source.replace(old, new))
            print(file)
        return
    sys.exit(f"there is no case {name}")


main()
