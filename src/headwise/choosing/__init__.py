"""Which shape is best on a task: rates tuned with equal effort, then a race on paired seeds.

    race.py           losses -> looks and a verdict: the statistics, without an engine
    trainings.py      what is trained: a task or a text, at one recipe, by shape, rate and seed
    candidates.py     limits -> shapes
    rates.py          which rates are tried next, and which one a shape gets
    clock.py          how long the next round will take, and a stop when time is up
    recommend.py      `choose`: tune, race, report; all it knows is in the store's rows
    choice.py         what comes out, and its sentences
    learning_curve.py what a lead is worth in training
    extrapolate.py    the race at smaller sizes, and what it says about a larger one
    page.py           the caterpillar and the page

The package may not be named `choose`, which is the public function.
"""
