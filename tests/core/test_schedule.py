"""Schedules: the paper's examples, rounding and grids worked out by hand, round trips, every error."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from fractions import Fraction as F

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from relaylm.core import schedule
from relaylm.core.notation import RESERVED
from relaylm.core.schedule import RowState, Schedule, Segment, Timetable, hand_made
from relaylm.errors import UserError
from relaylm.sampling.policy import SwitchByMaskFraction
from relaylm.search.exhaustive import all_placements

parse = Schedule.parse


def runs(models):
    """("L", "L", "H") -> [("L", 2), ("H", 1)]"""
    return [(model, len(list(group))) for model, group in itertools.groupby(models)]


def state(**changes):
    start = RowState(1, 1, 1.0, masked=1, length=1, free=1, calls=0, model=None, mean_logprob=None, min_logprob=None)
    return replace(start, **changes)


# --- the paper's schedules ------------------------------------------------------------------------------------------

PAPER = {  # at T = 1000, in the order of its tables
    "light": "L1000",
    "quarter:1": "L250 H750",
    "quarter:2": "H250 L250 H500",
    "quarter:3": "H500 L250 H250",
    "quarter:4": "H750 L250",
    "sandwich": "L125 H750 L125",
    "heavy": "H1000",
}


def test_hand_made_is_the_papers_table():
    assert {name: str(s.resample(1000)) for name, s in hand_made().items()} == PAPER
    assert list(hand_made()) == list(PAPER)


@pytest.mark.parametrize(("T", "counts"), [(1000, (125, 750, 125)), (256, (32, 192, 32)), (128, (16, 96, 16))])
def test_sandwich_at_the_papers_step_counts(T, counts):
    assert tuple(s.steps for s in parse("sandwich").resample(T).segments) == counts
    assert runs(parse("sandwich").timetable(T).models) == list(zip("LHL", counts))


def test_paper_counts_from_t_equal_one():
    """s(T) is the first step, from the fully masked row; s(1) the last one."""
    table = parse("L1 H2 4b:1").timetable()
    assert [table.s(i) for i in (4, 3, 2, 1)] == ["L", "H", "H", "4b"]
    assert table.models == ("L", "H", "H", "4b")
    big = parse("L125 H750 L125").timetable()
    assert "".join(big.s(i) for i in (1000, 876, 875, 126, 125, 1)) == "LLHHLL"


def test_rule_of_thumb_of_600_light_steps():
    assert str(parse("sandwich:60%").resample(1000)) == "L300 H400 L300"


def test_all_placements_are_the_papers_210():
    placements = all_placements()
    assert len(placements) == len(set(placements)) == 210
    assert str(placements[0]) == "1111000000" and str(placements[-1]) == "0000001111"
    for s in placements:
        assert Counter(s.timetable(1000).models) == {"L": 400, "H": 600}
    assert [str(s) for s in all_placements(3, 1)] == ["100", "010", "001"]


# --- values ---------------------------------------------------------------------------------------------------------


def test_one_step_is_not_all_steps():
    """1 == Fraction(1) in Python, but `L1` is one step and `L100%` is every step."""
    assert parse("L1") != parse("L100%")
    assert parse("L1").steps == 1 and parse("L100%").steps is None
    assert len({parse("L1"), parse("L100%")}) == 2
    assert parse("L100%").timetable(3).models == ("L",) * 3


def test_steps_and_models():
    assert parse("4b:125 12b:750 4b:125").steps == 1000
    assert parse("4b:125 12b:750 4b:125").models == ("4b", "12b")
    assert parse("sandwich").steps is None and parse("1010").steps is None
    assert parse("cells(a b a c)").models == ("a", "b", "c")


def test_bind_replaces_roles_only():
    assert str(parse("L1 H2 8b:3").bind("4b", "12b")) == "4b:1 12b:2 8b:3"
    assert str(parse("L1@50% H2@50%").bind("4b", "12b")) == "4b:1@50% 12b:2@50%"
    assert str(parse("100").bind("4b", "12b")) == "cells(4b 12b 12b)"
    assert str(parse("interleaved:25%").bind("4b", "12b")) == "interleaved(4b:25% 12b:75%)"
    assert str(parse("random:7:25%").bind("4b", "12b")) == "random:7(4b:25% 12b:75%)"
    assert parse("interleaved").bind("x", "x").timetable(4).models == ("x",) * 4
    with pytest.raises(UserError, match="cannot be a model's name"):
        parse("heavy").bind("4b", "two words")


def test_mirrored():
    assert str(parse("L1 H2 8b:3").mirrored()) == "8b:3 H2 L1"
    assert str(parse("L8@25% H200@75%").mirrored()) == "H200@75% L8@25%"
    assert str(parse("1000000111").mirrored()) == "1110000001"
    assert parse("interleaved:25%").mirrored() == parse("interleaved:25%")
    with pytest.raises(UserError, match="no mirror image"):
        parse("random:7").mirrored()


# --- rounding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "T", "counts"),
    [
        ("L12.5% H75% L12.5%", 4, "L1 H3"),  # 0.5, 3, 0.5: the tie goes to the masked end, the empty segment goes
        ("L1/3 H1/3 L1/3", 100, "L34 H33 L33"),
        ("L1/3 H1/3 L1/3", 101, "L34 H34 L33"),
        ("L10% H45% L45%", 10, "L1 H5 L4"),
        ("L21% H39% L40%", 10, "L2 H4 L4"),  # remainders 0.1, 0.9, 0
        ("L125 H750 L125", 256, "L32 H192 L32"),
        ("L125 H750 L125", 1000, "L125 H750 L125"),
        ("L50% L50%", 3, "L2 L1"),  # not merged
        ("heavy", 7, "H7"),
        ("interleaved:25%", 256, "interleaved(L64 H192)"),
        ("random:7:25%", 2, "random:7(L1 H1)"),  # 0.5 and 1.5
        ("interleaved:10%", 2, "H2"),
        ("L5%@25% H95%@75%", 100, "L5@25% H95@75%"),
    ],
)
def test_largest_remainder(text, T, counts):
    assert str(parse(text).resample(T)) == counts


def test_cells_end_at_rounded_boundaries():
    ends = [26, 51, 77, 102, 128, 154, 179, 205, 230, 256]
    s = parse("cells(" + " ".join(f"m{j}" for j in range(10)) + ")").resample(256)
    assert list(itertools.accumulate(seg.steps for seg in s.segments)) == ends
    assert s.placement == "ordered"
    assert str(parse("1000000111").resample(256)) == "L26 H153 L77"
    assert str(parse("1000000111").resample(1000)) == "L100 H600 L300"


def test_cells_round_halves_up_and_may_be_empty():
    assert str(parse("cells(a b)").resample(5)) == "a:3 b:2"  # 2.5 -> 3
    assert str(parse("cells(a b c d)").resample(2)) == "a:1 c:1"  # ends 0.5, 1, 1.5, 2 -> 1, 1, 2, 2
    assert str(parse("1010").resample(2)) == "L2"  # equal neighbours merged
    assert str(parse("cells(a b c d e f g)").resample(1)) == "d:1"


def test_timed_segments_must_keep_a_step():
    with pytest.raises(UserError, match=r"L5%@25% would get no step at T = 3, but every stretch of time needs one"):
        parse("L5%@25% H95%@75%").resample(3)


# --- placement of single steps --------------------------------------------------------------------------------------


def test_interleaved_by_hand():
    # n = 2 of T = 8: round(k / 4), halves up, is 0 0 1 1 1 1 2 2 2 for k = 0..8, so k = 1 and k = 5 are light
    assert "".join(parse("interleaved").timetable(8).models) == "HLHHHLHH"
    assert "".join(parse("interleaved(a:3 b:5)").timetable().models) == "bababbab"


@given(st.integers(1, 300), st.integers(1, 300))
def test_interleaved_never_lags(n, m):
    T = n + m
    models = parse(f"interleaved(L{n} H{m})").timetable().models
    assert models.count("L") == n
    for k, done in enumerate(itertools.accumulate(model == "L" for model in models), 1):
        assert abs(F(k * n, T) - done) <= F(1, 2)


def test_random_placement_never_changes():
    """Pinned: a stored result names its schedule, so the same text must mean the same steps for ever."""
    assert "".join(parse("random:7:25%").timetable(16).models) == RANDOM_7
    assert "".join(parse("random:8:25%").timetable(16).models) != RANDOM_7
    light = [i for i in range(1, 17) if parse("random:7:25%").timetable(16).s(i) == "L"]
    assert light == sorted(sorted(range(1, 17), key=lambda i: hashlib.sha256(b"7:%d" % i).hexdigest())[:4])


def test_random_placement_is_uniform():
    """Each of 10 steps is light in 30% of the seeds: 600 +- 4 standard deviations (20.5) of 2000."""
    counts = Counter(k for seed in range(2000) for k, m in enumerate(_random_models(seed)) if m == "L")
    assert all(abs(counts[k] - 600) < 82 for k in range(10)), counts


def _random_models(seed):
    return parse(f"random:{seed}:30%").timetable(10).models


RANDOM_7 = "HHHHLHHHHLHHLLHH"

# --- time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 3, 10, 1000])
def test_uniform_grid(T):
    assert parse("sandwich").timetable(T).times == tuple((T - k) / T for k in range(T + 1))


def test_grid_of_the_at_form():
    table = parse("L2@25% H5@65% L2@10%").timetable()
    assert table.models == tuple("LLHHHHHLL")
    assert table.times == (1.0, 0.875, 0.75, 0.62, 0.49, 0.36, 0.23, 0.1, 0.05, 0.0)


def test_at_form_with_equal_shares_is_the_uniform_grid_bit_for_bit():
    assert parse("L125@12.5% H750@75% L125@12.5%").timetable() == parse("L125 H750 L125").timetable()
    assert parse("L1@1/3 H2@2/3").timetable().times == (1.0, 2 / 3, 1 / 3, 0.0)


def test_shares_of_steps_with_time():
    table = parse("L20%@50% H80%@50%").timetable(5)
    assert table.models == tuple("LHHHH") and table.times == (1.0, 0.5, 0.375, 0.25, 0.125, 0.0)


@pytest.mark.parametrize(
    ("text", "t", "model"),
    [
        ("L25% H75%", 1.0, "L"),
        ("L25% H75%", 0.75000001, "L"),
        ("L25% H75%", 0.75, "H"),  # a segment from t1 down to t0 owns (t0, t1]
        ("L25% H75%", 1e-300, "H"),
        ("H90% L10%", 0.1, "L"),  # 0.1 is above 1/10 in binary; a boundary is the double nearest to it
        ("H70% L30%", 0.3, "L"),
        ("L125 H750 L125", 0.875, "H"),
        ("L125 H750 L125", 0.125, "L"),
        ("L8@25% H200@65% L8@10%", 0.76, "L"),
        ("L8@25% H200@65% L8@10%", 0.75, "H"),
        ("L8@25% H200@65% L8@10%", 0.1, "L"),
        ("1000000111", 0.91, "L"),
        ("1000000111", 0.9, "H"),
        ("1000000111", 0.31, "H"),
        ("1000000111", 0.3, "L"),
        ("12b", 0.5, "12b"),
    ],
)
def test_model_at_infinity(text, t, model):
    assert parse(text).model_at(t) == model
    assert parse(text)(state(step=0, steps=0, t=t)) == model


@given(st.sampled_from(["sandwich", "quarter:2", "L1/3 H2/3", "1000000111", "L10 H7 L3"]), st.integers(1, 50))
def test_infinity_agrees_with_every_grid_that_divides_it(text, scale):
    """Where no boundary needs rounding, step i and time t_i = i / T name the same model."""
    T = 60 * scale
    s = parse(text)
    table = s.resample(T).timetable()
    assert [s.model_at(i / T) for i in range(T, 0, -1)] == list(table.models)


# --- policies -------------------------------------------------------------------------------------------------------


def test_static_policies():
    table = parse("L1 H2 4b:1").timetable()
    for step, model in zip((4, 3, 2, 1), ("L", "H", "H", "4b")):
        assert table(state(step=step, steps=4)) == model
        assert parse("L1 H2 4b:1")(state(step=step, steps=4)) == model
    assert parse("L25% H75%")(state(step=4, steps=4)) == "L"
    with pytest.raises(UserError, match="the timetable has 4 steps, but the sampler takes 5"):
        table(state(step=1, steps=5))
    with pytest.raises(UserError, match="the timetable has 4 steps, but the sampler takes infinity"):
        table(state(step=0, steps=0))


def test_switch_by_mask_fraction():
    policy = SwitchByMaskFraction("4b", "12b", 0.25, 0.75)
    got = {masked: policy(state(masked=masked, length=100)) for masked in (100, 76, 75, 26, 25, 1)}
    assert got == {100: "4b", 76: "4b", 75: "12b", 26: "12b", 25: "4b", 1: "4b"}
    assert policy.models == ("4b", "12b")
    for low, high in ((0.5, 0.4), (-0.1, 0.5), (0.5, 1.1), (float("nan"), 1)):
        with pytest.raises(UserError, match="0 <= low <= high <= 1"):
            SwitchByMaskFraction("4b", "12b", low, high)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: parse(None), "a schedule is read from text, not from None"),
        (
            lambda: Schedule.from_bits("102"),
            "segment bits are at least two digits 0 or 1, such as 1000000111, not '102'",
        ),
        (lambda: Schedule.from_bits("1"), "segment bits"),
        (lambda: Segment("", 1), "'' cannot be a model's name"),
        (lambda: Segment("sandwich", 1), "'sandwich' cannot be a model's name"),
        (lambda: Segment("L", 0), "the steps of L must be a whole number from 1"),
        (lambda: Segment("L", True), "the steps of L must be a whole number from 1 to 10000000, not True"),
        (lambda: Segment("L", 0.5), "the steps of L must be a whole number .*, not 0.5"),
        (lambda: Segment("L", F(3, 2)), "the share of steps of L must be .* not 150%"),
        (lambda: Segment("L", F(1, 10**19)), r"must have a denominator of at most 10\^18: about 1e-17% is"),
        (lambda: Segment("L", F(1, 10**5000)), r"must have a denominator of at most 10\^18"),
        (lambda: Segment("L", 10**5000), "the steps of L must be .*, not a number of over 99 digits"),
        (lambda: Segment("L", F(-1, 8)), "the share of steps of L must be .*, not Fraction\\(-1, 8\\)"),
        (lambda: Segment("L", 1, F(-1, 2)), "the share of time of L"),
        (lambda: Segment("L", 1, 0.5), "the share of time of L must be a Fraction"),
        (lambda: Schedule(()), "at least one segment"),
        (lambda: Schedule("L5"), "segments must be a sequence of Segment, not 'L5'; for text use parse"),
        (lambda: Schedule(("L5",)), "each must be a Segment"),
        (lambda: Schedule((Segment("L", 1),), "sorted"), "the placement must be ordered, cells, interleaved or random"),
        (lambda: Schedule((Segment("L", 1),), "random:007"), "the placement must be"),
        (lambda: Schedule((Segment("L", 1),), "random:1"), "random:1 takes two segments, not 1"),
        (lambda: Schedule((Segment("L", 1), Segment("H", 1)), "cells"), "each of 2 cells must have the share 1/2"),
        (lambda: Schedule((Segment("L", 1),), "cells"), "each of 1 cells must have the share 1/1"),
        (
            lambda: parse("sandwich").timetable(),
            "'L12.5% H75% L12.5%' is written in shares and fits any T: say how many",
        ),
        (lambda: parse("sandwich").timetable(0), "T must be a whole number from 1 to 10000000, not 0"),
        (lambda: parse("sandwich").resample(2.0), "T must be a whole number"),
        (
            lambda: parse("L32 H192 L32").timetable(250),
            r"the schedule has 256 steps \(L32 H192 L32\), but T is 250; write it in percent or change --steps",
        ),
        (lambda: parse("heavy").model_at(0.0), r"time t must be above 0 and at most 1 \(fully masked\), not 0.0"),
        (lambda: parse("heavy").model_at(1.1), "time t must be"),
        (lambda: parse("heavy").model_at(float("nan")), "time t must be"),
        (lambda: parse("interleaved").model_at(0.5), "interleaved:25% needs a finite number of steps"),
        (lambda: parse("random:7").model_at(0.5), "random:7:25% needs a finite number of steps"),
        (lambda: parse("L3").timetable().s(0), "step i must be from 1 to T = 3, not 0"),
        (lambda: parse("L3").timetable().s(4), "step i must be from 1 to T = 3, not 4"),
        (lambda: Timetable(("L",), (1.0,)), r"T >= 1 models and T \+ 1 times, not 1 and 1"),
        (lambda: Timetable((), (1.0,)), r"T >= 1 models"),
        (lambda: Timetable(("L", "H"), (1.0, 1.0, 0.0)), "fall strictly from 1.0 to 0.0"),
        (lambda: Timetable(("L",), (1.0, 0.1)), "fall strictly from 1.0 to 0.0"),
        (lambda: all_placements(1, 1), "choosing 1 light cells of 1 is not possible"),
        (lambda: all_placements(4, 5), "choosing 5 light cells of 4 is not possible"),
        (lambda: all_placements(40, 20), "at most 1000000 ways"),
        (lambda: Schedule.from_json([]), "a schedule in JSON is an object with a list 'segments'"),
        (lambda: Schedule.from_json({"segments": [], "more": 1}), "a schedule in JSON"),
        (lambda: Schedule.from_json({"segments": [{"model": "L"}]}), "a segment in JSON is an object with"),
        (lambda: Schedule.from_json({"segments": [{"model": "L", "steps": "x"}]}), "'x' is not a share"),
        (lambda: Schedule.from_json({"segments": [{"model": "L", "steps": 1, "time": 1}]}), "1 is not a share"),
        (lambda: Schedule.from_json({"segments": [{"model": 5, "steps": 1}]}), "5 cannot be a model's name"),
        (lambda: Schedule.from_json({"segments": [{"model": "L", "steps": None}]}), "the steps of L must be"),
    ],
)
def test_errors(call, message):
    with pytest.raises(UserError, match=message):
        call()


# --- properties -----------------------------------------------------------------------------------------------------

names = st.one_of(
    st.sampled_from(["L", "H", "4b", "12b", "heavy", "10", "L125", "a-", "H1.5"]),
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,8}", fullmatch=True),
).filter(lambda name: name not in RESERVED)
counts = st.integers(1, 5000)


@st.composite
def shares(draw, n):
    """n positive fractions that add up to exactly 1; some with finite decimals, some without."""
    weights = draw(st.lists(st.integers(1, 1000), min_size=n, max_size=n))
    if draw(st.booleans()) and n > 1:  # sixteenths of a percent and the like
        cuts = draw(st.sets(st.integers(1, 1599), min_size=n - 1, max_size=n - 1))
        points = [0, *sorted(cuts), 1600]
        weights = [b - a for a, b in itertools.pairwise(points)]
    return [F(weight, sum(weights)) for weight in weights]


@st.composite
def schedules(draw, placements=("ordered", "timed", "cells", "interleaved", "random")):
    kind = draw(st.sampled_from(placements))
    n = 2 if kind in ("interleaved", "random") else draw(st.integers(1, 8))
    models = draw(st.lists(names, min_size=n, max_size=n))
    if kind == "cells":
        return Schedule(tuple(Segment(model, F(1, n)) for model in models), "cells")
    in_counts = draw(st.booleans())
    steps = draw(st.lists(counts, min_size=n, max_size=n)) if in_counts else draw(shares(n))
    time = draw(shares(n)) if kind == "timed" else [None] * n
    placement = {"timed": "ordered", "random": f"random:{draw(st.integers(0, 10**18 - 1))}"}.get(kind, kind)
    return Schedule(tuple(map(Segment, models, steps, time)), placement)


@settings(max_examples=500)
@given(schedules())
def test_round_trips(s):
    assert parse(str(s)) == s
    assert Schedule.from_json(json.loads(json.dumps(s.to_json()))) == s
    assert hash(parse(str(s))) == hash(s)
    assert s.digest == parse(str(s)).digest == hashlib.sha256(str(s).encode()).hexdigest()


@given(schedules(), schedules())
def test_different_schedules_have_different_digests(a, b):
    assert (a == b) == (a.digest == b.digest)


def test_digest_is_pinned():
    assert parse("sandwich").digest == hashlib.sha256(b"L12.5% H75% L12.5%").hexdigest()


@given(schedules(("ordered", "interleaved", "random")), st.integers(1, 3000))
def test_resample_is_within_one_step(s, T):
    s = replace(s, segments=tuple(replace(seg, model=f"m{j}") for j, seg in enumerate(s.segments)))
    resampled = s.resample(T)
    assert resampled.steps == T and resampled.resample(T) == resampled
    got = {segment.model: segment.steps for segment in resampled.segments}
    assert list(got) == [segment.model for segment in s.segments if segment.model in got]  # the order is kept
    total = sum(F(segment.steps) for segment in s.segments)
    for segment in s.segments:
        assert abs(got.get(segment.model, 0) - T * segment.steps / total) < 1


@given(schedules(("cells",)), st.integers(1, 3000))
def test_cells_are_within_half_a_step(s, T):
    resampled = s.resample(T)
    assert resampled.steps == T and resampled.placement == "ordered"
    assert all(a.model != b.model for a, b in itertools.pairwise(resampled.segments))
    boundaries = {F(T * j, len(s.segments)) for j in range(len(s.segments) + 1)}
    for end in itertools.accumulate(segment.steps for segment in resampled.segments):
        assert min(abs(end - boundary) for boundary in boundaries) <= F(1, 2)


@given(schedules(), st.integers(1, 400))
def test_timetables(s, T):
    try:
        table = s.resample(T).timetable()
    except UserError:
        assume(s.segments[0].time is None)  # only a stretch of time without a step may be refused
        raise
    assert table.steps == len(table.models) == T == len(table.times) - 1
    assert table.times[0] == 1.0 and table.times[-1] == 0.0
    assert all(a > b for a, b in itertools.pairwise(table.times))
    assert set(table.models) <= set(s.models)
    assert Counter(table.models) == sum((Counter({x.model: x.steps}) for x in s.resample(T).segments), Counter())
    if s.steps is None:
        assert s.timetable(T) == table


@given(schedules(("ordered", "timed", "cells", "interleaved")))
def test_mirrored_twice_is_identity(s):
    assert s.mirrored().mirrored() == s
    if s.steps is not None and s.placement == "ordered":
        there, back = s.timetable(), s.mirrored().timetable()
        assert back.models == there.models[::-1]
        assert back.times == pytest.approx([1 - t for t in there.times[::-1]], abs=1e-15)


def test_standard_library_only():
    code = (
        "import sys; import relaylm.errors, importlib.util as u;"
        "spec = u.spec_from_file_location('relaylm.core.schedule', sys.argv[1]); m = u.module_from_spec(spec);"
        "before = set(sys.modules); sys.modules['relaylm.core.schedule'] = m; spec.loader.exec_module(m);"
        "print({n.partition('.')[0] for n in set(sys.modules) - before} - set(sys.stdlib_module_names) - {'relaylm'})"
    )
    done = subprocess.run([sys.executable, "-c", code, schedule.__file__], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
