"""Points at which processes meet: everybody is answered, whatever the others do."""

from unisono.launch.rendezvous_state import RendezvousState


def test_an_exchange_ends_when_all_have_come():
    points = RendezvousState(2)
    assert points.arrive(1, "all_gather", "t", "b", 0.0) == []
    assert points.arrive(0, "all_gather", "t", "a", 0.0) == [
        (0, {"value": ["a", "b"]}),
        (1, {"value": ["a", "b"]}),
    ]


def test_the_chief_does_not_wait_for_those_who_follow():
    points = RendezvousState(3)
    assert points.arrive(2, "broadcast", "t", None, 0.0) == []
    assert points.arrive(0, "broadcast", "t", 7, 0.0) == [(0, {"value": 7}), (2, {"value": 7})]
    assert points.arrive(0, "broadcast", "t", 8, 0.0) == [(0, {"value": 8})]
    assert points.arrive(1, "broadcast", "t", None, 0.0) == [(1, {"value": 7})]
    assert points.arrive(1, "broadcast", "t", None, 0.0) == [(1, {"value": 8})]


def test_different_topics_are_told_to_all():
    points = RendezvousState(3)
    points.arrive(0, "all_gather", "fit, step 2", None, 0.0)
    (first, second) = points.arrive(2, "all_gather", "predict, step 1", None, 0.0)
    assert (first[0], second[0]) == (0, 2)
    assert "rank 0 came to “fit, step 2”, rank 2 to “predict, step 1”" in first[1]["error"]
    assert not first[1]["is_lost"]
    ((late, answer),) = points.arrive(1, "all_gather", "fit, step 2", None, 0.0)
    assert late == 1
    assert answer == first[1]


def test_an_exchange_and_a_follow_differ_even_under_one_topic():
    points = RendezvousState(2)
    points.arrive(0, "all_gather", "t", None, 0.0)
    assert all("error" in answer for _, answer in points.arrive(1, "broadcast", "t", None, 0.0))


def test_who_has_ended_is_not_waited_for():
    points = RendezvousState(2)
    points.arrive(0, "all_gather", "fit, step 3", None, 0.0)
    ((rank, answer),) = points.depart(1, "has ended its program", is_lost=False)
    assert rank == 0
    assert "Rank 1 has ended its program, while rank 0 waits for it" in answer["error"]
    assert not answer["is_lost"]
    ((rank, answer),) = points.arrive(0, "all_gather", "fit, step 4", None, 0.0)
    assert (rank, "Rank 1" in answer["error"]) == (0, True)


def test_a_lost_process_is_told_as_such():
    points = RendezvousState(3)
    points.arrive(0, "all_gather", "t", None, 0.0)
    points.arrive(2, "all_gather", "t", None, 0.0)
    answers = points.depart(1, "is gone", is_lost=True)
    assert [rank for rank, _ in answers] == [0, 2]
    assert all(answer["is_lost"] for _, answer in answers)


def test_sets_of_ranks_meet_by_themselves():
    points = RendezvousState(3)
    points.arrive(0, "all_gather", "all", None, 0.0)
    points.arrive(1, "all_gather", "pair", 1, 0.0, ranks=[1, 2])
    answers = points.arrive(2, "all_gather", "pair", 2, 0.0, ranks=[1, 2])
    assert answers == [(1, {"value": [1, 2]}), (2, {"value": [1, 2]})]
    points.arrive(1, "all_gather", "all", None, 0.0)
    assert len(points.arrive(2, "all_gather", "all", None, 0.0)) == 3


def test_waiting_for_the_chief_ends_when_it_announces_goes_on_or_ends():
    points = RendezvousState(3)
    assert points.listen(1, "saved") == []
    assert points.announce("saved", {"how": "well"}) == [(1, {"value": {"how": "well"}})]
    assert points.listen(2, "saved") == [(2, {"value": {"how": "well"}})]
    assert points.listen(1, "saved") == []
    assert points.arrive(0, "all_gather", "t", None, 0.0) == [(1, {"value": None})]
    points.arrive(1, "all_gather", "t", None, 0.0)
    points.arrive(2, "all_gather", "t", None, 0.0)
    assert points.listen(2, "saved") == []
    ((rank, answer),) = points.depart(0, "is gone", is_lost=True)
    assert (rank, answer["is_lost"]) == (2, True)
    assert answer["error"] == "Rank 0 is gone, while rank 2 waits for it at “saved”."


def test_long_waits_are_known_and_can_be_ended():
    points = RendezvousState(2)
    points.arrive(0, "all_gather", "t", None, 10.0)
    assert points.waited_at(before=10.0) == []
    (point,) = points.waited_at(before=11.0)
    assert (sorted(point.waiting), point.missing) == ([0], [1])
    assert points.give_up(point, "too long") == [(0, {"error": "too long", "is_lost": False})]
    assert points.waited_at(before=11.0) == []


def test_processes_that_wait_for_each_other_in_different_groups_are_told():
    points = RendezvousState(3)
    assert points.arrive(0, "all_gather", "of two", None, 0.0, [0, 1]) == []
    answers = points.arrive(1, "all_gather", "of all", None, 0.0)
    assert sorted(rank for rank, _ in answers) == [0, 1]
    for _, answer in answers:
        assert "rank 0 waits at “of two”" in answer["error"]
        assert "rank 1 waits at “of all”" in answer["error"]
    ((rank, answer),) = points.arrive(2, "all_gather", "of all", None, 0.0)
    assert (rank, "error" in answer) == (2, True)


def test_a_circle_of_three_groups():
    points = RendezvousState(3)
    assert points.arrive(0, "all_gather", "a", None, 0.0, [0, 1]) == []
    assert points.arrive(1, "all_gather", "b", None, 0.0, [1, 2]) == []
    answers = points.arrive(2, "all_gather", "c", None, 0.0, [0, 2])
    assert sorted(rank for rank, _ in answers) == [0, 1, 2]


def test_who_waits_in_another_group_is_no_circle():
    points = RendezvousState(3)
    assert points.arrive(2, "all_gather", "of all", None, 0.0) == []
    assert points.arrive(0, "all_gather", "of two", None, 0.0, [0, 1]) == []
    assert len(points.arrive(1, "all_gather", "of two", None, 0.0, [0, 1])) == 2
    assert points.arrive(0, "all_gather", "of all", None, 0.0) == []
    assert len(points.arrive(1, "all_gather", "of all", None, 0.0)) == 3


def test_followers_wait_for_the_first_alone():
    points = RendezvousState(3)
    assert points.arrive(1, "broadcast", "t", None, 0.0) == []
    assert points.arrive(2, "all_gather", "of two", None, 0.0, [1, 2]) == []
    assert len(points.arrive(0, "broadcast", "t", 7, 0.0)) == 2
    assert len(points.arrive(1, "all_gather", "of two", None, 0.0, [1, 2])) == 2
