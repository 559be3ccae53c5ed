"""Say what a family or checkpoint holds. Example: relaylm info path/to/family"""

import argparse

from relaylm.cli import tools


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    parser.add_argument("source", nargs="?", help="as for --family (default: wiki-bpe, or RELAYLM_FAMILY)")


def run(args: argparse.Namespace) -> tools.Result:
    """Show the family's models, sizes and files."""
    from relaylm.convert import describe

    about = describe(tools.default_family(args.source))
    tools.show(args, render(about))
    return about


def render(about: tools.Result) -> str:
    """The description as text, one model in a line."""
    kind = (about.get("tokenizer") or {}).get("type", "none")
    roles = about.get("roles") or {}
    form = f" ({about['format']} checkpoint)" if about.get("format") else ""
    lines = [
        f"{about['name'] or 'unnamed family'}{form}: length {about['length']}, vocabulary {about['vocab_size']} "
        f"(mask {about['mask_id']}), tokenizer {kind}"
    ]
    for name, model in about["models"].items():
        role = {roles.get("light"): " (L)", roles.get("heavy"): " (H)"}.get(name, "")
        facts = [f"{model[key]} {label}" for key, label in (("depth", "blocks"), ("width", "wide")) if model.get(key)]
        if model.get("block_length"):
            facts.append(f"blocks of {model['block_length']} positions")
        if model.get("parameters"):
            facts.append(f"{model['parameters']:,} parameters")
        if model.get("flops_per_call"):
            facts.append(f"{model['flops_per_call']:.3g} FLOPs a call")
        lines.append(f"  {name}{role}: {', '.join(facts)}")
    lines += ["  with a judge"] if about.get("judge") else []
    lines += [f"  with twins: {', '.join(about['twins'])}"] if about.get("twins") else []
    if about.get("bytes"):
        where = f" in {about['folder']}" if about.get("folder") else ""
        lines.append(f"  {about['bytes'] / 1e6:.1f} MB{where}")
    return "\n".join([*lines, *(f"  missing: {missing}" for missing in about.get("missing") or [])])
