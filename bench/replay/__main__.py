"""`python -m bench.replay --url URL --out FILE`. Exits 0 with a report, 2 for a wrong setting, 3 for a refusal."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import httpx

from bench.replay.options import parse
from bench.replay.run import Refused, run
from common.errors import ConfigError

EXIT_WRONG_SETTING = 2
EXIT_REFUSED = 3


def main(argv: Sequence[str] | None = None) -> int:
    try:
        options = parse(argv)
        result, page = run(options)
    except (ConfigError, OSError, httpx.HTTPError, httpx.InvalidURL) as error:
        print(f"no run: {error or type(error).__name__}", file=sys.stderr)
        return EXIT_WRONG_SETTING
    except Refused as refused:
        print("no report:", *refused.reasons, sep="\n- ", file=sys.stderr)
        return EXIT_REFUSED
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.html is not None:
        options.html.write_text(page)
    print(_summary(result))
    return 0


def _summary(result: dict[str, Any]) -> str:
    report = result["report"]
    lines = [f"{'prompts':12}{'requests':>9}{'TTFT p50':>12}{'TPOT p50':>12}{'output tok/s':>14}"]
    for name, figures in {"overall": report["overall"], **report["buckets"]}.items():
        ttft, tpot = (figures[key]["p50"] if figures[key] else None for key in ("ttft_ms", "tpot_ms"))
        lines.append(
            f"{name:12}{figures['num_requests']:9}{_ms(ttft):>12}{_ms(tpot):>12}{figures['output_tokens_per_s']:14.1f}"
        )
    return "\n".join(lines)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


if __name__ == "__main__":
    sys.exit(main())
