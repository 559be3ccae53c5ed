"""The notation of schedules: canonical texts, every error, and any text at all."""

from __future__ import annotations

from fractions import Fraction as F

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relaylm.core.schedule import Schedule, Segment
from relaylm.errors import UserError

parse = Schedule.parse


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("L125 H750 L125", "L125 H750 L125"),
        ("  L:125 -> H750→L125 ", "L125 H750 L125"),
        ("L125,H750 ,\n\tL125", "L125 H750 L125"),
        ("L125->H750->L125", "L125 H750 L125"),
        ("4b:125 12b:750 4b:0125", "4b:125 12b:750 4b:125"),
        ("L12.5% H75% L12.5%", "L12.5% H75% L12.5%"),
        ("L1/8 H3/4 L1/8", "L12.5% H75% L12.5%"),
        ("L12.50% H0075.0% L:1/8", "L12.5% H75% L12.5%"),
        ("L1/3 H2/3", "L1/3 H2/3"),
        ("L1/3 H1/2 L1/6", "L1/3 H50% L1/6"),
        ("L0.5% H99.5%", "L0.5% H99.5%"),
        ("L8@25% H200@65% L8@10%", "L8@25% H200@65% L8@10%"),
        ("L5%@1/4 H85%@65% 10b:10%@10%", "L5%@25% H85%@65% 10b:10%@10%"),
        ("12b", "12b:100%"),
        ("L", "L100%"),
        ("H", "H100%"),
        ("heavy", "H100%"),
        ("light", "L100%"),
        ("heavy:10 light:5", "heavy:10 light:5"),  # with a number they are models' names like any other
        ("L125:100%", "L125:100%"),
        ("L4:5 H-big.v2_x:6", "L4:5 H-big.v2_x:6"),
        ("quarter:1", "L25% H75%"),
        ("quarter:2", "H25% L25% H50%"),
        ("quarter:3", "H50% L25% H25%"),
        ("quarter:4", "H75% L25%"),
        ("sandwich", "L12.5% H75% L12.5%"),
        ("sandwich:25%", "L12.5% H75% L12.5%"),
        ("sandwich:1/3", "L1/6 H2/3 L1/6"),
        ("sandwich:0%", "H100%"),
        ("sandwich:100%", "L100%"),
        ("small-first", "L25% H75%"),
        ("small-first:40%", "L40% H60%"),
        ("small-first:0%", "H100%"),
        ("small-first:100%", "L100%"),
        ("interleaved", "interleaved:25%"),
        ("interleaved:1/3", "interleaved:1/3"),
        ("interleaved:0%", "H100%"),
        ("interleaved:100%", "L100%"),
        ("interleaved(L25% H75%)", "interleaved:25%"),
        ("interleaved(4b:25%, 12b:75%)", "interleaved(4b:25% 12b:75%)"),
        ("interleaved(L64 H192)", "interleaved(L64 H192)"),
        ("random:7", "random:7:25%"),
        ("random:7:25%", "random:7:25%"),
        ("random:7:0%", "H100%"),
        ("random:7(4b:25% 12b:75%)", "random:7(4b:25% 12b:75%)"),
        ("1000000111", "1000000111"),
        ("10", "10"),
        ("cells(L H)", "10"),
        ("cells(L)", "cells(L)"),
        ("cells(4b 8b, 12b 12b)", "cells(4b 8b 12b 12b)"),
    ],
)
def test_notation(text, canonical):
    s = parse(text)
    assert str(s) == canonical
    assert parse(canonical) == s


def test_text_becomes_these_values():
    assert parse("L8@25% 12b:2@3/4") == Schedule((Segment("L", 8, F(1, 4)), Segment("12b", 2, F(3, 4))))
    assert parse("100") == Schedule(tuple(Segment(m, F(1, 3)) for m in "LHH"), "cells")
    assert parse("random:7(L1 H2)").placement == "random:7"
    assert parse("sandwich:25%") == parse("L12.5% H75% L12.5%") == parse("sandwich:1/4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"cannot read '' as a schedule: write L125 H750 L125, .*one model's name"),
        ("L125 H75x", r"cannot read 'H75x' in 'L125 H75x' as a schedule: write L125"),
        ("4b:125 12b", r"cannot read '12b' in '4b:125 12b' as a schedule"),
        ("L-5 H5", r"cannot read 'L-5'"),
        ("L5@8 H5@2", r"cannot read 'L5@8'"),
        ("L12.5", r"'L12.5' is not a schedule: write steps as L125, shares as L12.5%, bits as 1001"),
        ("1", r"'1' is not a schedule"),
        ("1002", r"'1002' is not a schedule"),
        ("L0 H5", r"the steps of L must be a whole number from 1 to 10000000, not 0"),
        ("L99999999", r"the steps of L must be a whole number from 1 to 10000000, not 99999999"),
        ("L9000000 H9000000", r"the steps add up to 18000000, but at most 10000000"),
        ("L10% H80%", r"the shares of steps add up to 90%, but must be exactly 100%"),
        ("L1/3 H1/3", r"the shares of steps add up to 2/3, but must be exactly 100%"),
        ("L33.3% H33.3% L33.3%", r"add up to 99.9%, but must be exactly 100%"),
        ("L60% H60%", r"add up to 120%"),
        ("L0% H100%", r"the share of steps of L must be a Fraction above 0% and up to 100%, not 0%"),
        ("L150%", r"'150%' is not a share: write 0% to 100%"),
        ("L1/0", r"'1/0' is not a share"),
        ("L125 H75%", r"counts of steps \(L125\) and shares \(L12.5%\) must not be mixed"),
        ("L8@25% H200@65%", r"the shares of time add up to 90%, but must be exactly 100%"),
        ("L8@25% H200", r"either every segment says how much of the time it covers"),
        ("L8@0% H200@100%", r"the share of time of L must be a Fraction above 0%"),
        ("sandwich:150%", r"'150%' is not a share: write 0% to 100%"),
        ("sandwich:25", r"'25' is not a share: write 0% to 100%, as 25%, 12.5% or 1/3"),
        ("sandwich:", r"'' is not a share"),
        ("sandwich:25% H5", r"'25% H5' is not a share"),
        ("sandwich:5 H5", r"'5 H5' is not a share"),
        ("small-first:x", r"'x' is not a share"),
        ("quarter:5", r"a quarter is 1 \(at the masked end\), 2, 3 or 4, not '5'"),
        ("quarter", r"a quarter is 1 \(at the masked end\), 2, 3 or 4, not ''"),
        ("random", r"'random' is not a random placement: write random:SEED or random:SEED:SHARE"),
        ("random:x", r"is not a random placement"),
        ("random:-1", r"is not a random placement"),
        ("random:007", r"is not a random placement"),
        ("random:7:25", r"is not a random placement"),
        ("interleaved(L1 H2 L1)", r"interleaved takes two segments, not 3"),
        ("interleaved(L1 12b)", r"cannot read '12b' in 'interleaved\(L1 12b\)'"),
        ("interleaved(L1@50% H1@50%)", r"shares of time \(@\) go with ordered segments only, not with interleaved"),
        ("cells()", r"a schedule needs at least one segment"),
        ("cells(4b 8/b)", r"'8/b' cannot be a model's name: use letters, digits"),
        ("cells", r"'cells' cannot be a model's name: .* none of quarter, sandwich"),
        ("L1 random:5", r"'random' cannot be a model's name"),
        ("L" + "9" * 5000, r"'L9999.*\.\.\. is not a schedule"),
        ("L" + "9" * 5000 + " H1", r"cannot read 'L9999.*\.\.\. in 'L9999.*\.\.\. as a schedule"),
        ("L" + "9" * 20 + "%", r"is not a share"),
    ],
)
def test_parse_errors(text, message):
    with pytest.raises(UserError, match=message) as error:
        parse(text)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


notation = st.text(alphabet="LHlh0123456789ab%/@:.,()->→ _-\n", max_size=40)
words = """L H L5 H7 L50% H50% H1/2 4b:3 4b 4b:1/3 @50% @ : ( ) cells( interleaved random:7 sandwich quarter:2 10 0% ->
    → , 100% interleaved( L25%@1/2 H75%@1/2"""
pieces = st.lists(st.sampled_from(words.split()), max_size=8)


@settings(max_examples=2000)
@given(st.one_of(st.text(), notation, pieces.map(" ".join), pieces.map("".join)))
@example("L" + "9" * 5000)
@example("random:" + "9" * 5000)
@example("L1/" + "7" * 19 + " H1/3")
@example(" ".join(f"L1/{10**17 + 2 * j + 1}" for j in range(400)))
@example("٣b:٣")
@example("L٣")
@example("L5\n")
def test_any_text_is_a_schedule_or_a_user_error(text):
    try:
        s = parse(text)
    except UserError as error:
        assert "\n" not in str(error)
        return
    assert parse(str(s)) == s
