"""What tests of several folders share: servers, messages, oracles and cases. Imported as `support.NAME`."""

from pathlib import Path

import pytest

pytest.register_assert_rewrite(*(f"support.{path.stem}" for path in Path(__file__).parent.glob("[a-z]*.py")))
