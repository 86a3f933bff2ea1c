"""Writing images: order, short writes, faults, counterfeit media, interrupts."""

from __future__ import annotations

import hashlib
import io
import random

import pytest
from media_faults import Card

from colibri_kit.errors import TransferError, VerifyError
from colibri_kit.media import usedmap, write

MIB = 1 << 20
SIZE = 8 * MIB + 4096
IMAGE = random.Random(7).randbytes(SIZE)
WHOLE = [(0, SIZE)]


def put(card: Card, ranges: list[usedmap.Range] = WHOLE) -> write.Written:
    return write.write_image(io.BytesIO(IMAGE), SIZE, ranges, card)


def test_every_byte_arrives_and_the_table_last() -> None:
    card = Card(10 * MIB)
    done = put(card)
    assert bytes(card.data[:SIZE]) == IMAGE
    assert card.log[-1] == (0, MIB)
    assert card.log[0] == (0, MIB)
    assert done.written_bytes == SIZE and done.skipped_bytes == 0
    assert done.verified_bytes == SIZE
    assert card.flushed[-1] == card.writes, "the last write is flushed"
    # Before the table went out, everything else was flushed.
    assert card.flushed[-2] == card.writes - 1
    assert done.sha256 == hashlib.sha256(IMAGE[MIB:] + IMAGE[:MIB]).hexdigest()


def test_the_last_mib_is_cleared_of_a_stale_gpt() -> None:
    card = Card(10 * MIB)
    put(card)
    assert bytes(card.data[-MIB:]) == bytes(MIB)
    assert set(card.data[SIZE : 9 * MIB]) == {0xA5}


def test_short_writes_are_continued() -> None:
    card = Card(10 * MIB, short=100_003)
    put(card)
    assert bytes(card.data[:SIZE]) == IMAGE


def test_only_mapped_ranges_are_written() -> None:
    card = Card(10 * MIB)
    done = put(card, [(0, MIB), (3 * MIB, 4 * MIB)])
    assert set(card.data[MIB : 3 * MIB]) == {0xA5}
    assert bytes(card.data[3 * MIB : 4 * MIB]) == IMAGE[3 * MIB : 4 * MIB]
    assert (done.written_bytes, done.skipped_bytes) == (2 * MIB, SIZE - 2 * MIB)


@pytest.mark.parametrize("dies_at", [1, 2, 3, 6, 11])
def test_a_failed_write_leaves_no_table(dies_at: int) -> None:
    card = Card(10 * MIB, dies_at=dies_at)
    with pytest.raises(TransferError) as caught:
        put(card)
    assert "byte" in caught.value.message and caught.value.code == "CK-FLASH-WRITE"
    assert caught.value.state == write.UNSEALED
    first = bytes(card.data[:MIB])
    assert first in (bytes(MIB), b"\xa5" * MIB)
    assert first != IMAGE[:MIB]
    if dies_at > 1:
        assert first == bytes(MIB)


def test_a_write_of_nothing_is_not_repeated_for_ever() -> None:
    card = Card(10 * MIB, short=0)
    with pytest.raises(TransferError, match="took no byte at offset 0"):
        put(card)


def test_a_flipped_bit_is_found_and_placed() -> None:
    card = Card(10 * MIB, flip=(5 * MIB + 12345,))
    with pytest.raises(VerifyError) as caught:
        put(card)
    assert f"first at byte {5 * MIB + 12345}" in caught.value.message
    assert "1 bytes differ in 1 scattered places" in caught.value.message
    assert caught.value.state == write.UNSEALED
    assert bytes(card.data[:MIB]) == bytes(MIB)


def test_a_flipped_bit_in_the_table_takes_it_away_again() -> None:
    card = Card(10 * MIB, flip=(100,))
    with pytest.raises(VerifyError, match="first at byte 100"):
        put(card)
    assert bytes(card.data[:MIB]) == bytes(MIB)


def test_counterfeit_that_reads_zeros() -> None:
    card = Card(10 * MIB, real=6 * MIB, beyond="zero")
    with pytest.raises(VerifyError) as caught:
        put(card)
    assert f"first at byte {6 * MIB}" in caught.value.message
    assert "all zero from there on" in caught.value.message and "counterfeit" in caught.value.message


def test_counterfeit_that_wraps_round() -> None:
    card = Card(12 * MIB, real=4 * MIB, beyond="wrap")
    with pytest.raises(VerifyError) as caught:
        put(card)
    assert "wrap round" in caught.value.message and "counterfeit" in caught.value.message


def test_a_reader_that_scatters_errors_is_not_called_counterfeit() -> None:
    card = Card(10 * MIB, flip=(2 * MIB, 5 * MIB + 1, 7 * MIB + 9))
    with pytest.raises(VerifyError) as caught:
        put(card)
    assert "3 bytes differ in 3 scattered places" in caught.value.message
    assert "counterfeit" not in caught.value.message


@pytest.mark.parametrize("when", [1, 4, 9, 11])
def test_ctrl_c_leaves_no_table(when: int) -> None:
    def stop(number: int) -> None:
        if number == when:
            raise KeyboardInterrupt

    card = Card(10 * MIB, on_write=stop)
    with pytest.raises(KeyboardInterrupt):
        put(card)
    assert bytes(card.data[:MIB]) != IMAGE[:MIB]
    assert not any(card.data[:MIB]) or when == 1


def test_an_image_that_shrinks_meanwhile() -> None:
    card = Card(10 * MIB)
    with pytest.raises(TransferError, match="it was shortened meanwhile"):
        write.write_image(io.BytesIO(IMAGE[: 3 * MIB]), SIZE, WHOLE, card)
    assert not any(card.data[:MIB])
