"""What a report page holds for its scripts."""

import json
import re
from typing import Any


def page_data(page: str) -> dict[str, Any]:
    """The figures, tables and curves of a page, by section."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])
