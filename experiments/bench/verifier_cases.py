"""Gold answers of the shapes that MATH has, with completions that are right and that are wrong."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """A gold answer, how a model may end when it is right, and how when it is not."""

    gold: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]


def boxed(*answers: str) -> tuple[str, ...]:
    """Returns completions that end with each answer in a box."""
    return tuple(f"Therefore the answer is $\\boxed{{{answer}}}$." for answer in answers)


SHAPES: dict[str, tuple[Case, ...]] = {
    "integers": (
        Case(
            "18",
            (*boxed("18", "18.0", "+18"), "The answer is 18.", "**Answer: 18**"),
            boxed("-18", "81", "17 or 18", "9+9"),
        ),
        Case("-7", (*boxed("-7", "-7.0"), "The final answer is $-7$."), boxed("7", "-70")),
        Case("1,234,567", boxed("1234567", "1,234,567", "1{,}234{,}567"), boxed("1", "234567", "1234")),
        Case("1000", boxed("1000", "1,000", "10^3"), boxed("1,00", "100")),
    ),
    "fractions": (
        Case(
            "\\frac{3}{4}", boxed("\\frac{3}{4}", "\\dfrac34", "3/4", "0.75", "\\frac{6}{8}"), boxed("\\frac43", "34", "3, 4")
        ),
        Case("-\\frac{1}{2}", boxed("-\\frac{1}{2}", "\\frac{-1}{2}", "-0.5"), boxed("\\frac12", "-2")),
        Case(
            "\\frac{\\sqrt{2}}{2}", boxed("\\frac{\\sqrt{2}}{2}", "\\frac{1}{\\sqrt2}"), boxed("\\sqrt2", "\\frac{2}{\\sqrt2}")
        ),
    ),
    "mixed numbers": (
        Case("2\\frac{1}{2}", boxed("2\\frac{1}{2}", "\\frac52", "2.5"), boxed("1", "\\frac{2}{2}", "21/2")),
        Case("1\\frac{3}{4}", boxed("\\frac{7}{4}", "1.75", "1 3/4", "1¾"), boxed("\\frac34", "13/4")),
        Case(
            "1 1/2",
            (*boxed("1 1/2", "3/2", "1.5", "1\\frac{1}{2}", "1\\frac12", "1\\ 1/2", "1½"), "#### 1 1/2", "It is 1 1/2 cups."),
            boxed("11/2", "1", "1/2", "2 1/2"),
        ),
        Case("\\frac32", (*boxed("1 1/2", "1½"), "#### 1 1/2", "The answer is 1 1/2."), (*boxed("-1 1/2"), "#### 1 1/3")),
    ),
    "decimals": (
        Case("0.5", boxed("0.5", ".5", "\\frac12"), boxed("5", "0.05")),
        Case("3.14", boxed("3.14", "\\frac{157}{50}"), boxed("\\pi", "3.1")),
    ),
    "expressions": (
        Case("x^2+2x+1", boxed("x^2+2x+1", "(x+1)^2", "1+2x+x^2"), boxed("x^2+2x-1", "x^2+1", "2x+1")),
        Case("2\\sqrt{3}", boxed("2\\sqrt{3}", "\\sqrt{12}"), boxed("\\sqrt3", "2", "6")),
        Case("\\frac{\\pi}{6}", boxed("\\frac{\\pi}{6}", "\\pi/6"), boxed("\\pi", "\\frac{6}{\\pi}", "\\frac{1}{6}")),
        Case("2k", boxed("2k", "k+k"), boxed("2", "k", "2+k")),
        Case("e^{2}", boxed("e^2"), boxed("e", "2e")),
        Case("2^{10}", boxed("2^{10}", "1024"), boxed("20", "2")),
    ),
    "complex numbers": (
        Case("6 - 5i", boxed("6-5i", "-5i+6"), boxed("5", "6", "6+5i", "6-5")),
        Case("3i", boxed("3i", "0+3i"), boxed("3", "-3i")),
    ),
    "equations": (
        Case("y = 2x + 3", boxed("y=2x+3", "2x+3"), boxed("y=3x+2", "y=2x-3", "x=2y+3")),
        Case("x=5", boxed("x=5", "5"), boxed("x=-5", "y")),
    ),
    "intervals": (
        Case(
            "[0,1)",
            boxed("[0,1)", "[0, 1)", "0 \\leq x < 1", "1 > x \\ge 0"),
            boxed("0 < x < 1", "0 \\le x \\le 1", "(0,1]", "[0,1]", "(0,1)", "0", "0,1"),
        ),
        Case("0 \\leq x < 1", boxed("[0,1)", "0 \\le x < 1"), boxed("(0,1)", "0 < x < 1")),
        Case("x<-1\\text{ or }x>1", boxed("(-\\infty,-1)\\cup(1,\\infty)", "x>1\\text{ or }x<-1"), boxed("(-1,1)", "x<-1")),
        Case(
            "(-\\infty, 2]",
            boxed("x \\le 2", "2 \\geq x", "(-\\infty,2]", "(-\\infty, 2]"),
            boxed("(-\\infty,2)", "[2,\\infty)", "2"),
        ),
        Case(
            "(-\\infty,-1)\\cup(1,\\infty)",
            boxed("(-\\infty,-1)\\cup(1,\\infty)", "(1,\\infty)\\cup(-\\infty,-1)", "x < -1 \\text{ or } x > 1"),
            boxed("(-1,1)", "(-\\infty,-1)", "(-\\infty,-1)\\cap(1,\\infty)"),
        ),
    ),
    "tuples": (
        Case(
            "(1,2)",
            boxed("(1,2)", "(1, 2)", "\\left(1,2\\right)"),
            boxed("(2,1)", "1", "(1,2,3)", "[1,2]", "\\{1,2\\}"),
        ),
        Case(
            "(\\frac12, -3, 0)",
            boxed("(0.5,-3,0)", "\\left(\\frac{1}{2},-3,0\\right)"),
            boxed("(\\frac12,3,0)", "(\\frac12,-3)"),
        ),
    ),
    "sets and lists": (
        Case("\\{1,2,3\\}", boxed("\\{1,2,3\\}", "\\{3,2,1\\}"), boxed("\\{1,2\\}", "\\{1,2,4\\}", "6")),
        Case("\\pm 2", (*boxed("2,-2", "-2, 2", "\\pm2", "x = \\pm 2"), "#### ±2"), boxed("2", "-2", "\\pm 3", "2,3")),
        Case("2,-2", (*boxed("\\pm 2", "±2"), "The answer is $\\pm 2$."), boxed("\\pm 1")),
        Case("3 \\pm \\sqrt2", boxed("3+\\sqrt2, 3-\\sqrt2", "3\\pm\\sqrt{2}"), boxed("3+\\sqrt2", "\\pm\\sqrt2")),
        Case("1, -2", boxed("1,-2", "-2, 1", "1\\text{ and }-2"), boxed("1", "-2", "1, 2")),
    ),
    "matrices": (
        Case(
            "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
            boxed("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}"),
            boxed("\\begin{pmatrix}1&3\\\\2&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\end{pmatrix}", "1"),
        ),
        Case(
            "\\begin{pmatrix} -1 \\\\ \\frac12 \\end{pmatrix}",
            boxed("\\begin{pmatrix}-1\\\\0.5\\end{pmatrix}", "\\begin{pmatrix}-1\\\\1/2\\end{pmatrix}"),
            boxed("\\begin{pmatrix}1\\\\0.5\\end{pmatrix}", "\\begin{pmatrix}0.5\\\\-1\\end{pmatrix}"),
        ),
    ),
    "units": (
        Case(
            "12\\text{ cm}",
            boxed("12", "12\\text{ cm}", "12\\,\\mathrm{cm}", "12 cm"),
            boxed("21\\text{ cm}", "\\text{cm}"),
        ),
        Case("30^\\circ", boxed("30^\\circ", "30", "30^{\\circ}"), boxed("60^\\circ", "3")),
        Case("36\\text{ square units}", boxed("36", "36\\text{ square units}", "36\\text{ units}^2"), boxed("6", "63")),
        Case("\\$18.50", boxed("18.50", "\\$18.50", "18.5"), boxed("18", "1850", "\\$81.50")),
        Case("18 dollars", boxed("18", "\\$18", "\\text{18 dollars}"), boxed("81", "\\text{81 dollars}")),
    ),
    "percentages": (
        Case("25\\%", boxed("25\\%", "25"), boxed("2.5\\%", "75\\%")),
        Case("12.5\\%", boxed("12.5\\%", "12.5"), boxed("125\\%", "12\\%")),
    ),
    "text": (
        Case(
            "\\text{Monday}",
            (*boxed("\\text{Monday}", "Monday"), "The answer is Monday."),
            boxed("\\text{Tuesday}", "1"),
        ),
        Case("\\text{even}", boxed("\\text{even}", "even"), boxed("\\text{odd}", "\\text{neither even nor odd}")),
        Case("\\text{June 20}", boxed("\\text{June 20}", "June 20"), boxed("\\text{July 20}", "20", "\\text{June 2}")),
    ),
    "multiple choice": (
        Case(
            "\\text{(B)}",
            (*boxed("\\text{(B)}", "B", "(B)", "\\textbf{(B)}"), "The answer is (B).", "B", "(B)", "**B**"),
            (*boxed("A", "\\text{(C)}", "AB"), "A", "Vitamin B", "B C", "Be B or C"),
        ),
        Case(
            "\\text{C}", (*boxed("C", "\\text{C}"), "**Answer: C**", "C", "C.", "The answer is $C$."), boxed("B", "\\text{(D)}")
        ),
        Case("A", boxed("A", "\\text{A}", "(A)"), (*boxed("a_1", "D", "\\text{A or B}"), "A cat", "A is wrong.", "A B")),
    ),
    "powers of ten and bases": (
        Case(
            "3 \\times 10^{8}", boxed("3\\times10^8", "300000000", "3\\cdot 10^{8}"), boxed("3", "3\\times10^7", "3\\times 10")
        ),
        Case("1011_2", boxed("1011_2", "1011_{2}", "1011 in base 2"), boxed("1101_2", "11_2", "1011")),
        Case("12_7", (*boxed("12_7"), "#### 12_7"), (*boxed("12", "12_8", "9"), "#### 12", "The answer is 12.")),
    ),
    "commitment": (
        Case(
            "18",
            ("\\boxed{17} no wait, \\boxed{18}", "<think>maybe \\boxed{5}</think> The answer is 18."),
            ("\\boxed{18} no: \\boxed{17}",),
        ),
        Case(
            "18",
            ("$\\fbox{18}$", "Answer: \\$18", "**18**"),
            ("The answer is 17 or 18.", "It is not 18.", "18 is wrong; the answer is 17."),
        ),
    ),
}
