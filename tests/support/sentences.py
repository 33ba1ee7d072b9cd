"""Folders of sentences as GLUE has them."""

from support.data import written


def tsv(folder, train, dev, header="sentence\tlabel", dev_name="dev.tsv", end="\n"):
    """A folder with both parts; a part is rows, or bytes as they are."""
    for name, part in (("train.tsv", train), (dev_name, dev)):
        if part is not None:
            lines = (
                [header, *("\t".join(map(str, row)) for row in part)]
                if not isinstance(part, bytes)
                else []
            )
            written(
                folder / name,
                part
                if isinstance(part, bytes)
                else end.join(line for line in lines if line is not None) + end,
            )
    return str(folder)


GOOD = [("it is good", 1), ("it is bad", 0), ("not so good", 0), ("not so bad", 1)]
HELD = [("so good", 1), ("so so bad", 0)]
