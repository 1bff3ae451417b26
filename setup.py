"""What pyproject.toml cannot say: scripts/ is installed under another name, beside packages that are searched for."""

from setuptools import find_namespace_packages, setup

setup(
    packages=["glm_scripts", *find_namespace_packages(include=["data_utils*", "megatron_lite*"])],
    package_dir={"glm_scripts": "scripts"},
)
