"""Pictures of a trajectory go wherever its tokens go: journal, dump, workers, packed rows, servers."""

import dataclasses

import numpy as np
import pytest

from rljax.batching.packing import batch_of, pack
from rljax.batching.pictures import decode_pictures, encode_pictures
from rljax.engines.http.continuation import remaining, shortened
from rljax.engines.http.protocol import generate_body
from rljax.engines.http.replies import Reply
from rljax.errors import UserError
from rljax.rollout import dump, journal
from rljax.rollout.trajectories import Episode
from rljax.types import Completion, Finish, Group, Request, SamplingParams
from rljax.workers.messages import decode_request, encode_request

URLS = ("data:image/png;base64,AAAA", "data:image/png;base64,é==")


def completion(n):
    return Completion(np.arange(n, dtype=np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), Finish.ABORT)


def trajectory(length, *pictures):
    episode = Episode(range(length), pictures)
    episode.sampled(completion(2))
    return episode.trajectory(1.0, {})


def request(**changes):
    plain = Request("0/1#2", np.arange(9, dtype=np.int32), SamplingParams(8), 3, URLS, "<image><image> how many?")
    return dataclasses.replace(plain, **changes)


def test_files_and_messages_give_pictures_back(tmp_path):
    group = Group("0/1", (trajectory(3, *URLS), trajectory(4), trajectory(5, URLS[1])))
    wanted = [t.pictures for t in group.trajectories]
    assert [t.pictures for t in journal.unpack(*journal.pack(group.trajectories))] == wanted
    dump.save(tmp_path, [group])
    (loaded,) = dump.load(tmp_path)
    assert [t.pictures for t in loaded.trajectories] == wanted
    for sent in (request(), request(pictures=(), marked_text="")):
        _, got = decode_request(encode_request(7, sent))
        assert (got.pictures, got.marked_text) == (sent.pictures, sent.marked_text)
    entries, arrays = journal.pack(group.trajectories)
    with pytest.raises(ValueError, match="pictures"):
        journal.unpack([entries[0] | {"pictures": "no list"}, *entries[1:]], arrays)


def test_a_row_has_the_pictures_of_its_trajectories_in_their_order():
    members = [trajectory(3, "a"), trajectory(9, "b", "c"), trajectory(4), trajectory(5, "d")]
    packing = pack([len(t) for t in members], 12)
    rows = decode_pictures(batch_of(members, packing).pictures)
    for row, found in enumerate(rows):
        inside = sorted(np.flatnonzero(packing.row == row), key=lambda i: packing.offset[i])
        assert found == tuple(url for i in inside for url in members[i].pictures)
    assert batch_of([trajectory(3)], pack([5], 12)).pictures is None, "text alone"
    assert decode_pictures(np.pad(encode_pictures([URLS, ()]), ((0, 1), (0, 7)))) == [URLS, (), ()]


def test_servers_get_the_text_with_the_pictures_and_their_count_of_tokens_is_checked():
    body = generate_body(request(), cache_key="k")
    assert body["text"] == request().marked_text and body["image_data"] == list(URLS) and "input_ids" not in body
    assert "image_data" not in generate_body(request(pictures=()), cache_key="k")
    chunk = {
        "output_ids": [4],
        "meta_info": {
            "weight_version": "0",
            "output_token_logprobs": [[-1.0, 4, None]],
            "finish_reason": None,
            "prompt_tokens": 9,
        },
    }
    assert Reply(0, False, 9).add(chunk) == 1 and Reply(0, False).add(chunk) == 1
    with pytest.raises(UserError, match="the server sees 9 tokens in a prompt of 12"):
        Reply(0, False, 12).add(chunk)


def test_a_completion_with_pictures_begins_again():
    asked = request()
    assert remaining(asked, completion(3)) is asked and not len(shortened(completion(3), asked).token_ids)
    text_alone = request(pictures=())
    assert len(remaining(text_alone, completion(3)).prompt_ids) == 12
