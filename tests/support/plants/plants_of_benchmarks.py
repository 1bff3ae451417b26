"""Planted bugs of the comparison with other systems: each of them would make it unfair."""

from __future__ import annotations

from support.plants.plant import Plant

SAME_HOURS, TESTS = "benchmarks/same_hours.py", "tests/test_laptop_benchmarks.py"
TRIALS = f"{TESTS}::test_each_system_has_the_same_trials_for_the_same_seconds_and_its_best"

BENCHMARKS = (
    Plant(
        "other systems have fewer trials than ours",
        SAME_HOURS,
        "        for rate in options.rates\n    ]",
        "        for rate in options.rates[: None if system in OURS else 1]\n    ]",
        (TRIALS,),
    ),
    Plant(
        "our trials have twice the seconds of others",
        SAME_HOURS,
        "round(TRIAL_SHARE * options.seconds",
        "round((2 if system in OURS else 1) * TRIAL_SHARE * options.seconds",
        (TRIALS,),
    ),
    Plant(
        "Muon's trials are planned with the speed of AdamW",
        SAME_HOURS,
        "options.seconds / measured[optimizer]",
        'options.seconds / measured["adamw"]',
        (TRIALS,),
    ),
    Plant(
        "leads are taken where the slower system has decayed",
        SAME_HOURS,
        'if point["step"] <= run["steps"] - run["decay"]',
        'if point["step"] <= run["steps"]',
        (f"{TESTS}::test_leads_are_taken_before_the_decay_and_speed_is_apart",),
    ),
)
