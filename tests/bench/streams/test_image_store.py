"""Images brought as needed are the images of the whole data set, whatever steps are asked for in whatever order."""

import threading

import numpy as np
import pytest
import torch

from contnorm.bench.streams.device import ImageFeed, PrefetchedFeed, SplitImages

IMAGES = np.arange(40 * 3 * 2 * 2, dtype=np.uint8).reshape(40, 3, 2, 2)
CPU = torch.device("cpu")


def plan() -> list[np.ndarray]:
    """30 steps of 4 images, then 10 of 7, as when a memory begins to be replayed."""
    chance = np.random.default_rng(0)
    return [chance.integers(0, 40, size=4 if step < 30 else 7) for step in range(40)]


def window(steps: int) -> PrefetchedFeed:
    return PrefetchedFeed(SplitImages(IMAGES, CPU, whole=False), plan(), size=2 * steps * 7 * 12)


def check(feed: ImageFeed, start: int, end: int) -> None:
    steps = plan()[start:end]
    for images, places in zip(steps, feed.places(steps, start), strict=True):
        np.testing.assert_array_equal(feed.pixels[torch.from_numpy(places)].numpy(), IMAGES[images])


@pytest.mark.parametrize("length", [1, 3, 8, 100])
def test_prefetched_images_equal_whole_images(length: int) -> None:
    whole, some = ImageFeed(SplitImages(IMAGES, CPU, whole=True)), window(length)
    start = 0
    while start < 40:
        end = some.reach(start, 40)
        assert start < end <= start + length
        check(whole, start, end)
        check(some, start, end)
        start = end


def test_steps_out_of_order_are_loaded() -> None:
    """A run that was resumed, or goes on one by one, asks for other steps than those sent for."""
    some = window(5)
    for start, end in [(0, 5), (5, 6), (6, 7), (20, 25), (28, 31), (0, 2), (35, 40)]:
        check(some, start, end)


def test_closed_feed_has_no_thread() -> None:
    before = set(threading.enumerate())
    some = window(5)
    check(some, 0, 5)
    assert set(threading.enumerate()) - before, "the next steps are on their way"
    some.close()
    ImageFeed(SplitImages(IMAGES, CPU, whole=True)).close()
    assert not set(threading.enumerate()) - before


def test_images_use_a_limited_share_of_device_memory() -> None:
    assert window(5).pixels.numel() <= 2 * 5 * 7 * 12
    assert window(0).steps == 1, "one step has to fit, whatever is asked for"


def test_images_on_the_host_are_equal() -> None:
    wanted = torch.tensor([3, 3, 39, 0])
    whole, host = (SplitImages(IMAGES, CPU, whole)[wanted] for whole in (True, False))
    assert torch.equal(whole, host) and np.array_equal(whole.numpy(), IMAGES[wanted.numpy()])


def test_read_only_images_are_copied() -> None:
    locked = IMAGES.copy()
    locked.flags.writeable = False
    assert torch.equal(SplitImages(locked, CPU, True).pixels, torch.from_numpy(IMAGES))


def test_strides_of_equal_arrays_do_not_reach_the_network() -> None:
    images = np.arange(5 * 4 * 4, dtype=np.uint8).reshape(5, 4, 4)
    rows = np.ones(5, bool)
    for strange in (images[rows, None], images[:, None], images.reshape(5, 1, 4, 4)):
        stored = SplitImages(strange, torch.device("cpu"), whole=True)
        assert stored[torch.tensor([3, 1])].stride() == (16, 16, 4, 1)
        assert torch.equal(stored.pixels[:, 0], torch.from_numpy(images))
