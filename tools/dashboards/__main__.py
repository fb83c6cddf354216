"""Writes `cluster_configs/dashboards`; `--check` writes none, and exits with 1 where one is not up to date."""

import sys
from functools import partial

from tools.dashboards.grafana import dashboard_json
from tools.dashboards.table import DASHBOARDS
from tools.kept_files import ROOT, main

FOLDER = ROOT / "cluster_configs" / "dashboards"


if __name__ == "__main__":
    sys.exit(main(__doc__, FOLDER, {f"rachis-{each.name}.json": partial(dashboard_json, each) for each in DASHBOARDS}))
