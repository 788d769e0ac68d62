"""quality.py and learnt.py find what they are there to find: a figure of any column that has moved, a scheme that is gone or new.
And docs/quality.md shows what is in the files."""

import sys

import learnt
import quality

ROW = {"scheme": "a", "bits_per_coordinate_all_in": "2.1875", "bits_per_byte": "1.86500",
       "delta_bits_per_byte": "-0.00100", "kl_bits": "0.001000", "rel_mse_k": "0.050000", "rel_mse_v": "0.090000",
       "top1": "0.9500"}
MOVED = {"bits_per_coordinate_all_in": "2.1876", "bits_per_byte": "1.86530", "delta_bits_per_byte": "-0.00130",
         "kl_bits": "0.000980", "rel_mse_k": "0.050100", "rel_mse_v": "nan", "top1": "0.9530"}
ROUNDED = {"bits_per_coordinate_all_in": "2.1875", "bits_per_byte": "1.86503", "delta_bits_per_byte": "-0.00097",
           "kl_bits": "0.001002", "rel_mse_k": "0.050001", "rel_mse_v": "0.089999", "top1": "0.9510"}


def main():
    before = {"a": ROW}
    assert list(quality.compare(before, {"a": {**ROW, **ROUNDED}})) == []
    for column, value in MOVED.items():
        found = list(quality.compare(before, {"a": {**ROW, column: value}}))
        assert found == [f"a: {column} was {ROW[column]}, is {value}"], found
    # A column that the committed file does not have, or has nothing in, is not compared; one that is gone is found.
    without = {column: value for column, value in ROW.items() if column != "top1"}
    assert list(quality.compare({"a": without}, before)) == []
    assert list(quality.compare({"a": {**ROW, "top1": ""}}, before)) == []
    assert list(quality.compare(before, {"a": without})) == ["a: top1 was 0.9500, is absent"]
    assert list(quality.compare(before, {"a": {**ROW, "top1": ""}})) == ["a: top1 was 0.9500, is absent"]
    assert list(quality.compare(before, {})) == ["a: not measured any more"]
    assert list(quality.compare({}, before)) == ["a: new"]
    depths = {"attend frame: K 1 / V 1": ROW, "attend frame: K 3 / V 3": ROW, "kivi 3": ROW, "kivi-delta 3": ROW}
    measured = {scheme: ROW for scheme in depths if scheme not in ("attend frame: K 1 / V 1", "kivi-delta 3")}
    assert list(quality.of_one_depth(depths, measured)) == ["attend frame: K 3 / V 3", "kivi 3", "kivi-delta 3"]
    assert "| a | 2.188 | 0.00100 | 1.8650 | -0.0010 | 0.05000 | 0.09000 |" in list(quality.table(before))
    of_tokens = {"a": {"scheme": "a", "bits_per_coordinate_all_in": "4.1667", "bits_per_token": "4.03762",
                       "delta_bits_per_token": "-0.00856", "kl_bits": "0.008706", "rel_mse_k": "", "top1": "0.9551"}}
    assert list(quality.table(of_tokens))[0] == "| scheme | bits | KL | bits/token | delta | top-1 | MSE K |"
    assert list(quality.table(of_tokens))[2] == "| a | 4.167 | 0.00871 | 4.0376 | -0.0086 | 0.955 |  |"
    learnt_row = {"bits_per_coordinate_all_in": "2.2870", "kl_bits": "0.020000", "kl_bits_error": "0.001000"}
    for bits, kl, found in [("2.2900", "0.025600", 0), ("2.2870", "0.010000", 0), ("2.2500", "0.020000", 1),
                            ("2.2870", "0.026000", 1)]:
        new = {"a": {**learnt_row, "bits_per_coordinate_all_in": bits, "kl_bits": kl}}
        assert len(list(learnt.compare({"a": learnt_row}, new))) == found, (bits, kl)
    assert list(learnt.compare({"a": learnt_row}, {})) == ["a: not measured any more"]
    shown = quality.with_tables("<!-- table: baselines.csv ^ggml q[48]_0 -->\nold\n<!-- end -->").splitlines()
    assert [line.split(" | ")[0] for line in shown if line.startswith("| ")] == ["| scheme", "| ggml q8_0", "| ggml q4_0"], shown
    page = quality.read_page()
    assert page.count("<!-- table: ") == 4
    assert quality.with_tables(page) == page, "docs/quality.md does not show the CSV files: quality.py --update --full"


if __name__ == "__main__":
    sys.exit(main())
