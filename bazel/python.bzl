"""Python as this tree needs it: packages that are not in the tree come from the environment that is active."""

def library(name, srcs, deps = [], data = []):
    """Python files whose imports point down and are of `deps`, or it does not build (tests/import_rule.py); `data` are files that they read."""
    native.genrule(
        name = name + "_imports",
        srcs = srcs,
        outs = [name + "_imports.txt"],
        cmd = "python3 $(location //tests:import_rule.py) --library=//%s --deps=%s $(SRCS) > $@" % (native.package_name(), ",".join(deps)),
        tools = ["//tests:import_rule.py"],
    )
    native.py_library(
        name = name,
        srcs = srcs,
        data = [name + "_imports.txt"] + data,
        visibility = ["//visibility:public"],
        deps = deps,
    )

def sources():
    """The files of a folder, for a library of the folder above."""
    native.filegroup(
        name = "sources",
        srcs = native.glob(["*.py"]),
        visibility = ["//visibility:public"],
    )

def suite(name = "tests", timeout = "eternal"):
    """The fast tests of a folder, by pytest: what is marked slow or gpu is left out."""
    files = native.glob(["test_*.py"])
    native.filegroup(
        name = "sources",
        srcs = native.glob(["*.py"]),
        visibility = ["//visibility:public"],
    )
    native.py_test(
        name = name,
        srcs = ["//bazel:run_pytest.py"],
        args = ["$(rootpath %s)" % file for file in files],
        data = native.glob(["*"], exclude = ["BUILD"]) + ["//:project"],
        main = "//bazel:run_pytest.py",
        timeout = timeout,
        deps = [
            "//rljax/experiments",
            "//tests",
        ],
    )
