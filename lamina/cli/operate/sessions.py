"""``lamina-launch sessions list|drop|export|import URL``: sessions of a running server; ``sessions advise MODEL``: what
they need.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
from urllib.parse import quote

from lamina.config.conflicts import check_together
from lamina.facts.report import table
from lamina.tools.plan import session_advice

from .operator_client import check_url, send_request
from .session_files import read_session, write_session

ASK_S = 10.0
ACTIONS = {
    "list": "show all sessions, and where their KV is",
    "drop": "delete one, with its KV",
    "export": "write one to a new encrypted file, for another server that has its KV in --kv-offload dir=",
    "import": "read one from such a file",
    "advise": "say how much memory or disk a model's sessions need, and what that costs",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this sub-command."""
    parser.add_argument("action", choices=ACTIONS, help="; ".join(f"{k}: {v}" for k, v in ACTIONS.items()))
    parser.add_argument("url", help="the server's address, such as http://127.0.0.1:8000; advise: the model")
    parser.add_argument("id", nargs="?", default="", help="drop, export: the session_id")
    parser.add_argument("--file", default="", help="export, import: the session's file, of mode 0600")
    parser.add_argument(
        "--key-file", default="", help="export, import: the file's key, made by openssl rand -hex 32, of mode 0600"
    )
    parser.add_argument(
        "--api-key",
        default="",
        help="the API key whose sessions are meant; default: LAMINA_API_KEY, which other users cannot see",
    )
    parser.add_argument("--json", action="store_true", help="list: print them as JSON")
    parser.add_argument("--dry-run", action="store_true", help="say what would be asked for, and exit")
    session_advice.add_arguments(parser.add_argument_group("advise"))


def run(args: argparse.Namespace) -> int:
    """Returns exit status 0. Raises ValueError for bad input, OSError if no server answers, and WorkerError."""
    if args.action == "advise":
        return session_advice.run(args)
    check_url(args.url)
    if (args.action in ("drop", "export")) != bool(args.id):
        raise ValueError("sessions drop and export need the session_id, sessions list and import take none")
    given = {
        "sessions export or import": args.action in ("export", "import"),
        "sessions --file": args.file,
        "sessions --key-file": args.key_file,
    }
    check_together({name for name, is_given in given.items() if is_given})
    if args.dry_run:
        print(f"would {args.action} {args.id or 'the sessions'} of {args.url}")
        return 0
    key = args.api_key or os.environ.get("LAMINA_API_KEY", "")
    if args.action == "drop":
        send_request(args.url, f"/v1/sessions/{quote(args.id, safe='')}", key, ASK_S, method="DELETE")
        print(f"dropped {args.id}")
        return 0
    if args.action == "export":
        answer = send_request(args.url, f"/v1/sessions/{quote(args.id, safe='')}/export", key, ASK_S, "session")
        write_session(args.file, args.key_file, base64.b64decode(answer["session"]))
        print(f"wrote {args.id} to {args.file}")
        return 0
    if args.action == "import":
        session = base64.b64encode(read_session(args.file, args.key_file)).decode()
        answer = send_request(args.url, "/v1/sessions/import", key, ASK_S, "id", "turns", body={"session": session})
        print(f"took over {answer['id']}, {answer['turns']} turns")
        return 0
    sessions = send_request(args.url, "/v1/sessions", key, ASK_S, "data")["data"]
    if args.json:
        print(json.dumps(sessions, indent=2))
        return 0
    rows = [[s["id"], str(s["turns"]), str(s["tokens"]), s["tier"]] for s in sessions]
    print("\n".join(table([["session", "turns", "tokens", "tier"], *rows], left=(0, 3))))
    return 0
