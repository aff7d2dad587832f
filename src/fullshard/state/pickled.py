"""What a pickle would allocate, found out before it is loaded."""

from __future__ import annotations

import pickletools

from fullshard.errors import CheckpointError

_STOP, _PUT_LONG, _PUT_TEXT = b".rp"
_OPERATIONS = {ord(each.code): each for each in pickletools.opcodes}
# Bytes that follow an operation; below zero: lines, or a length and as many bytes.
_FOLLOWING = {code: 0 if each.arg is None else each.arg.n for code, each in _OPERATIONS.items()}
_NUM_LINES = {ord("c"): 2, ord("i"): 2}
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


def require_bounded(content: bytes) -> None:
    """Raise if loading a pickle would take more memory than its own size explains.

    Python's unpickler makes a table as long as the largest number that a pickle gives to one of
    its objects: eight bytes on disk can ask for tens of gigabytes.
    """
    position, end = 0, len(content)
    while position < end:
        operation = content[position]
        following = _FOLLOWING.get(operation)
        position += 1
        if operation == _STOP or following is None:
            return  # at an operation that it does not know, the unpickler raises
        if following >= 0:
            if operation == _PUT_LONG:
                _require_number(int.from_bytes(content[position : position + 4], "little"), end)
            position += following
        elif following == pickletools.UP_TO_NEWLINE:
            for _ in range(_NUM_LINES.get(operation, 1)):
                line, _, _ = content[position : position + 300].partition(b"\n")
                if operation == _PUT_TEXT:
                    _require_number(int(line) if line.isdigit() else end + 1, end)
                position = content.find(b"\n", position) + 1 or end
        else:
            num_bytes = _LENGTH_BYTES[following]
            length = int.from_bytes(content[position : position + num_bytes], "little")
            position += num_bytes + length
    raise CheckpointError(f"index: its end is expected after {end} bytes, found none; it is cut.")


def _require_number(number: int, most: int) -> None:
    if number > most:
        raise CheckpointError(
            f"index: objects numbered up to {most} fit in it, found a larger number; the file is "
            "damaged, or made to exhaust memory."
        )
