"""What all ranks have encoded: images are there once the last one has them, or fail if one did."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from hypothesis import given
from hypothesis import strategies as st

from minisgl.ranks.processes.all_encoded import AllEncoded


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), unique_by=lambda each: each[0]))
def test_each_image_is_told_once_when_the_last_rank_has_ended_it(
    fails: list[tuple[int, bool]],
) -> None:
    images = AllEncoded(3, Future())
    told: dict[int, str] = {}
    for number, by_one in fails:
        images.ended(number, "no memory" if by_one else "")
        told |= images.agreed([(number, "")], wait=False)
        assert number not in told
        images.ended(number, "")
        told |= images.agreed((), wait=True)
        assert told[number] == ("no memory" if by_one else "")
    assert images.agreed((), wait=True) == ()


def test_a_wait_is_for_what_rank_0_has_ended_and_not_for_what_others_have() -> None:
    images = AllEncoded(2, Future())
    images.ended(2, "")  # a step ahead
    images.ended(1, "")
    assert images.agreed([(1, "")], wait=True) == ((1, ""),)
    assert images.agreed([(2, "")], wait=True) == ((2, ""),)


def test_a_wait_ends_with_the_last_rank_or_when_the_ranks_are_lost() -> None:
    lost: Future[None] = Future()
    images = AllEncoded(2, lost)
    found: list[object] = []

    def wait(number: int) -> None:
        found.append(images.agreed([(number, "")], wait=True))

    for number, end in ((1, lambda: images.ended(1, "")), (2, lambda: lost.set_result(None))):
        thread = threading.Thread(target=wait, args=(number,))
        thread.start()
        end()
        thread.join()
    assert found == [((1, ""),), ()]
