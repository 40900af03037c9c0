"""Matrix products, decompositions of matrices, Fourier transforms."""

from __future__ import annotations

from monoflow.layout.call import Call, changed, held, letters, normal_dims, term
from monoflow.layout.table.entry import Entry, same, whole


def _added(dims: str, product: str, linear: str = "0 1 | 0 2") -> Entry:
    """What is added to a product is broadcast to it: its dimensions are the last of `dims`."""

    def entry(call: Call) -> str:
        names = dims.split()
        return f"+{term(names[len(names) - call.rank('self') :])}, {product} -> {dims}; linear {linear}"

    return entry


def solve(call: Call) -> str:
    """Right sides are vectors where there is one less dimension than the matrices have."""
    a, b = call.shape("A"), call.shape("B")
    vectors = len(b) == 1 or (len(b) == len(a) - 1 and b == a[:-1])
    right = "... b!" if vectors else "... b! k!"
    return f"... m! n!, {right} -> {right}, ... m! n!, ... p!, ..."


def fourier(call: Call) -> str:
    names = letters(call.rank("self"))
    dims = normal_dims(call["dim"], len(names))
    left = [n if n.endswith("!") else f"{n}+" for n in held(names, dims)]
    return f"{term(left)} -> {term(changed(names, dims))}; linear 0"


RULES: dict[str, Entry] = {
    "mm": "m k, k n -> m n; linear 0 | 1",
    "bmm": "b m k, b k n -> b m n; linear 0 | 1",
    "addmm": _added("m n", "m k, k n"),
    "baddbmm": _added("b m n", "b m k, b k n"),
    "addbmm": _added("m n", "b m k, b k n"),
    "addmv": _added("m", "m k, k"),
    "dot": "k, k -> .; linear 0 | 1",
    "mv": "m k, k -> m; linear 0 | 1",
    "trace": "m! n! -> .; linear 0",
    **same("... m k!, ... n k! -> ... m n", "_cdist_forward _euclidean_dist"),
    "_cdist_backward": "... m+ n+, ... m k!, ... n k!, ... m n -> ... m k!; linear 0",
    "_pdist_forward": "n! d! -> p!",
    "_pdist_backward": "p!, n! d!, p! -> n! d!; linear 0",
    # Of each matrix of a batch.
    **same("... m! n! -> ... m! n!", "cholesky cholesky_inverse linalg_matrix_exp"),
    **same("... m! n! -> ... m! n!; linear 0", "tril triu"),
    **same("... m! n! -> ... m! n!, ...", "linalg_cholesky_ex linalg_inv_ex"),
    **same("... m! n! -> ... m! n!, ... p!, ...", "linalg_lu_factor_ex linalg_ldl_factor_ex"),
    **same("... m! n! -> ... k!, ... m! n!", "_linalg_eigh linalg_eig"),
    **same("... m! n!, ... p!, ... a! b! -> ... a! b!; linear 2", "linalg_lu_solve linalg_ldl_solve ormqr"),
    "_linalg_eigvals": "... m! n! -> ... k!",
    "_linalg_svd": "... m! n! -> ... a! b!, ... k!, ... c! d!",
    "_linalg_det": "... m! n! -> ..., ... m! n!, ... p!",
    "_linalg_slogdet": "... m! n! -> ..., ..., ... m! n!, ... p!",
    "_linalg_solve_ex": solve,
    "linalg_solve_triangular": "... m! n!, ... a! b! -> ... a! b!; linear 1",
    "triangular_solve": "... a! b!, ... m! n! -> ... a! b!, ... m! n!",
    "cholesky_solve": "... a! b!, ... m! n! -> ... a! b!; linear 0",
    "lu_unpack": "... m! n!, ... p! -> ... a! b!, ... c! d!, ... e! f!",
    "linalg_lu": "... m! n! -> ... a! b!, ... c! d!, ... e! f!",
    "linalg_qr": "... m! n! -> ... a! b!, ... c! d!",
    "geqrf": "... m! n! -> ... m! n!, ... t!",
    "linalg_householder_product": "... m! n!, ... t! -> ... m! n!",
    "linalg_pinv.atol_rtol_tensor": "... m! n!, ..., ... -> ... n! m!",
    **same(fourier, "_fft_c2c _fft_r2c _fft_c2r"),
    **same(whole, "_scaled_mm _scaled_mm_v2"),
    "_trilinear": "...!, ...!, ...! -> ...!; linear 0 | 1 | 2",
}
