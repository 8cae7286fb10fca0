"""``lamina-launch kv stat|verify|purge DIR``: a directory of stored KV, from outside."""

from __future__ import annotations

import argparse
import json
import re
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.config.conflicts import need_text
from lamina.facts.report import size_text, table

if TYPE_CHECKING:
    from lamina.kv.disk_store.store_directory import StoreDirectory


ACTIONS = {
    "stat": "show pages and bytes of each model and tenant",
    "verify": "read everything; exit status 1 if something is damaged",
    "purge": "remove everything, with the keys that encrypt it",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this sub-command."""
    parser.add_argument("action", choices=ACTIONS, help="; ".join(f"{k}: {v}" for k, v in ACTIONS.items()))
    parser.add_argument("dir", metavar="DIR", help="the directory of --kv-offload dir=")
    parser.add_argument("--json", action="store_true", help="stat: print it as JSON")
    parser.add_argument(
        "--tenant",
        metavar="SHA256",
        help='purge: only this tenant, named by the SHA-256 of its API key in hex; "" = the tenant of a server without '
        "keys",
    )
    parser.add_argument("--kv-key-file", default="", metavar="FILE", help="file with the secret, if it is not in DIR")
    parser.add_argument("--dry-run", action="store_true", help="say what is stored, change and read nothing, and exit")


def run(args: argparse.Namespace) -> int:
    """Exit status: 0, or 1 where something is damaged. Raises ValueError, OSError."""
    from lamina.kv.disk_store.store_directory import INDEX, StoreDirectory

    if args.tenant is not None and args.action != "purge":
        raise ValueError(need_text("kv --tenant", ["kv purge"]))
    path = Path(args.dir).expanduser()
    if path.is_dir() and not (path / INDEX).exists():  # its reader prints nothing then
        raise ValueError(f"DIR {args.dir}: no KV store is there: name the directory of --kv-offload dir=")
    with closing(StoreDirectory(args.dir, "DIR", make=False)) as folder:
        if args.action == "stat" or args.dry_run:
            return _stat(folder, as_json=args.json)
        return _verify(folder, args) if args.action == "verify" else _purge(folder, args)


def _stat(folder: StoreDirectory, *, as_json: bool) -> int:
    from lamina.kv.disk_store.maintenance import store_summary

    summary = store_summary(folder)
    names = [(part.identity.hex()[:16], part.tenant.hex(), part.pages) for part in summary.parts]
    if as_json:
        rows = [
            {"model": model, "tenant": tenant, "pages": pages, "bytes": part.nbytes}
            for (model, tenant, pages), part in zip(names, summary.parts, strict=True)
        ]
        text = json.dumps({"segments": summary.segments, "bytes": summary.nbytes, "stored": rows}, indent=2)
    else:
        cells = [
            [model, tenant, str(pages), size_text(part.nbytes)]
            for (model, tenant, pages), part in zip(names, summary.parts, strict=True)
        ]
        lines = table([["model", "tenant", "pages", "on disk"], *cells], left=(0, 1))
        text = "\n".join([*lines, f"{summary.segments} segments, {size_text(summary.nbytes)}"])
    print(text)
    return 0


def _verify(folder: StoreDirectory, args: argparse.Namespace) -> int:
    from lamina.kv.disk_store.maintenance import DamagedPage, verify
    from lamina.kv.disk_store.store_directory import store_secret

    whole = damaged = 0
    for check in verify(folder, store_secret(folder, args.kv_key_file, make=False, flag="--kv-key-file")):
        if isinstance(check, DamagedPage):
            damaged += 1
            key, count = check.page.key.hex()[:16], len(check.fragments)
            print(f"page {key}: {count} fragments are damaged, the first: {check.reason}")
        else:
            whole += 1
    print(f"{whole} pages are whole, {damaged} are damaged")
    return int(damaged > 0)


def _tenant(key_id: str) -> bytes:
    from lamina.server.tenants import salt_of

    if key_id and not re.fullmatch(r"[0-9a-fA-F]{64}", key_id):
        raise ValueError("--tenant: give the 64 hex digits of the SHA-256 of an API key, as sha256sum prints them")
    return salt_of(bytes.fromhex(key_id), None)


def _purge(folder: StoreDirectory, args: argparse.Namespace) -> int:
    from lamina.kv.disk_store.maintenance import purge, purge_tenant
    from lamina.kv.disk_store.store_directory import store_secret

    if args.tenant is None:
        purge(folder)
        print("purged: the store is empty, and its keys are gone")
    else:
        pages = purge_tenant(
            folder, store_secret(folder, args.kv_key_file, make=False, flag="--kv-key-file"), _tenant(args.tenant)
        )
        print(f"purged {pages} pages of the tenant, and its data key")
    return 0
