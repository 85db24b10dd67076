from loadtest.faults_bench import Bench
from loadtest.report import Row
async def soak(bench: Bench, seconds_s: float, seed: int) -> list[Row]:
    return []
