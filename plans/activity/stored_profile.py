"""Storage of activity profiles in a package: activity.bin and the manifest's `profiles`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from neuronpipe.plans.activity.recorded_profile import MeasuredProfile, binned
from neuronpipe.plans.package.activity_profile import PROFILE_MODES, ActivityProfile, ProfileMode
from neuronpipe.plans.package.atomic_output import whole_file
from neuronpipe.plans.package.manifest import ACTIVITY, MANIFEST, FileEntry, Manifest
from neuronpipe.plans.package.optional_file import give_file
from neuronpipe.plans.package.reader import Package

Stored = tuple[bytes, bytes]
"""The bytes of a profile in activity.bin: those of experts and bins, and those of neurons."""


def add_profile(package: Package, measured: MeasuredProfile) -> Package:
    """Add a profile to a package, or replace that of the same mode, and return the package with its new id. Raises
    UserError for errors of the file system."""
    manifest, mode = package.manifest, measured.profile.mode
    stored = {profile.mode: package.activity.stored(profile.mode) for profile in manifest.profiles}
    stored[mode] = measured.frequencies.to_bytes(binned(manifest, measured.frequencies.neurons))
    profiles = {profile.mode: profile for profile in manifest.profiles} | {mode: measured.profile}
    if mode == "exact":
        manifest = replace(
            manifest,
            fired_by_layer=measured.fired_by_layer,
            trigger_fired_by_layer=measured.trigger_fired_by_layer,
        )
    return write_profiles(package, manifest, profiles.values(), stored)


def remove_profile(package: Package, mode: ProfileMode) -> Package:
    """Remove the profile of a mode, if there is one, and return the package. For callers that changed its predictor or
    thresholds."""
    manifest = package.manifest
    remaining = [profile for profile in manifest.profiles if profile.mode != mode]
    if len(remaining) == len(manifest.profiles):
        return package
    if remaining:
        return write_profiles(
            package, manifest, remaining, {profile.mode: package.activity.stored(profile.mode) for profile in remaining}
        )
    with whole_file(package.path / MANIFEST) as place:
        place.write_bytes(_without(manifest).sealed().to_bytes())
    with contextlib.suppress(OSError):
        (package.path / ACTIVITY).unlink()
    return Package.open(package.path)


def _without(manifest: Manifest) -> Manifest:
    files = {name: entry for name, entry in manifest.files.items() if name != ACTIVITY}
    return replace(manifest, files=files, profiles=())


def write_profiles(
    package: Package, manifest: Manifest, profiles: Iterable[ActivityProfile], stored: Mapping[ProfileMode, Stored]
) -> Package:
    """Write activity.bin and a manifest that names it, and return the package.

    manifest: the new manifest, except for the profiles
    """
    ordered = tuple(sorted(profiles, key=lambda profile: PROFILE_MODES.index(profile.mode)))
    without = _without(package.manifest) if package.manifest.profiles else None

    def write(path: Path) -> None:
        with path.open("wb") as file:
            for part in (0, 1):
                for profile in ordered:
                    file.write(stored[profile.mode][part])
            file.flush()
            os.fsync(file.fileno())

    def with_it(entry: FileEntry) -> Manifest:
        return replace(manifest, files={**manifest.files, ACTIVITY: entry}, profiles=ordered)

    return give_file(package, ACTIVITY, write, with_it=with_it, without=without)
