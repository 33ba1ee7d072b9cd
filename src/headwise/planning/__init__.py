"""From limits on costs to every shape that meets them: `plan`, and the value that it returns.

units.py      amounts with units               fields.py   choices of a field
limits.py     what a shape may cost            space.py    which shapes are considered
costs.py      the costs by name                grid.py     candidates, in columns of numbers
straight.py   costs as straight lines          counts.py   exact costs of candidates
search.py     what meets the limits            pareto.py   what no other row beats
result.py     Plan and Row                     plan.py     the function
backends.py   which kernel runs a row          measure.py  milliseconds of a row
configs.py    a row as other projects' settings
"""
