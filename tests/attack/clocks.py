"""A wall clock that jumps by days, back and forth: answers, deadlines and health do not depend on it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from target import KEYS, serving
from verdict import Verdict, first_failure

# Each second of the real clock, the wall clock of the process is another day of the month before or after.
JUMPS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
static int (*real)(clockid_t, struct timespec*);
static long jump(long s) { return (s * 2654435761u >> 7) % 60 * 86400 - 30 * 86400; }
int clock_gettime(clockid_t id, struct timespec* t) {
  if (!real) real = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  int rc = real(id, t);
  if (rc == 0 && id == CLOCK_REALTIME) t->tv_sec += jump(t->tv_sec);
  return rc;
}
int gettimeofday(struct timeval* tv, void* tz) {
  struct timespec t;
  int rc = clock_gettime(CLOCK_REALTIME, &t);
  if (tv) { tv->tv_sec = t.tv_sec; tv->tv_usec = t.tv_nsec / 1000; }
  return rc;
}
time_t time(time_t* out) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  if (out) *out = t.tv_sec;
  return t.tv_sec;
}
"""
BODY = {"prompt": "import os\n", "max_tokens": 24, "temperature": 0.0}
COUNT = 30


def attack(folder: Path) -> Verdict:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return Verdict(None, "needs a C compiler, for a clock that jumps")
    source, library = folder / "jumps.c", folder / "jumps.so"
    source.write_text(JUMPS)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=60)
    created, texts = set[int](), set[str]()
    with serving(folder, env={"LD_PRELOAD": str(library)}) as target:
        statuses = set[int]()
        for _ in range(COUNT):
            status, body = target.ask("POST", "/v1/completions", BODY, key=KEYS[0])
            statuses.add(status)
            if status == 200:
                answer = json.loads(body)
                texts.add(answer["choices"][0]["text"])
                created.add(answer["created"] // 86400)
        served = target.serves()
    checks = {
        f"every request is answered, not {sorted(statuses)}": statuses == {200},
        "all answers are the same": len(texts) == 1,
        "others are served": served,
    }
    return first_failure(checks, f"{COUNT} requests, in {len(created)} different days by the server's clock")
