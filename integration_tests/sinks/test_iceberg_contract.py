"""The contract of sinks on an Iceberg table: SQL catalogs, a local warehouse and S3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyiceberg.catalog import load_catalog

from sparkonce.model import Committable
from sparkonce.sinks import IcebergSink
from sparkonce.testing import SinkContract, SinkWorld

if TYPE_CHECKING:
    import pyarrow as pa

TABLE = "shop.orders"


class TestIcebergSink(SinkContract):
    """A catalog in SQLite, files in a folder."""

    race_rounds = 40

    @pytest.fixture
    def make_world(self, tmp_path: Path) -> Iterator[Callable[[pa.Schema], SinkWorld]]:
        settings = {
            "type": "sql",
            "uri": f"sqlite:///{tmp_path}/catalog.db",
            "warehouse": f"file://{tmp_path}/lake",
        }
        catalog = load_catalog("default", **settings)

        def rows() -> list[dict[str, Any]]:
            return catalog.load_table(TABLE).scan().to_arrow().to_pylist()

        def lose(committable: Committable) -> None:
            folder = f"{committable.branch_id}files"
            for file in (tmp_path / "lake" / "shop" / "orders" / "data" / folder).iterdir():
                file.unlink()

        world = SinkWorld(
            sink=lambda: IcebergSink(TABLE, catalog=settings, create="if_missing"),
            visible=rows,
            unfinished=lambda: list((tmp_path / "lake").rglob("*.mark")),
            lose=lose,
        )
        yield lambda schema: world
        catalog.close()
