locals {
  object_actions = {
    reader  = ["s3:GetObject"]
    writer  = ["s3:GetObject", "s3:PutObject"]
    cleaner = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"]
  }
  granted_actions = { for name, actions in local.object_actions : name => actions if name != "cleaner" || var.cleaner }
  key_actions = {
    reader  = ["kms:Decrypt"]
    writer  = ["kms:Decrypt", "kms:GenerateDataKey"]
    cleaner = ["kms:Decrypt", "kms:GenerateDataKey"]
  }
  s3_services = local.express ? ["s3", "s3express"] : ["s3"]
}

data "aws_iam_policy_document" "access" {
  for_each = local.granted_actions

  # Without s3:ListBucket a key that is not there is answered with 403 instead of 404, and a cache
  # could not tell a miss from a refusal. GET and HEAD have no s3:prefix, hence IfExists; a listing
  # that names no prefix has none either, so names of keys are not hidden, only their content is.
  dynamic "statement" {
    for_each = local.express ? [] : [1]

    content {
      sid       = "List"
      actions   = ["s3:ListBucket"]
      resources = [local.bucket_arn]

      condition {
        test     = "StringLikeIfExists"
        variable = "s3:prefix"
        values   = ["${var.prefix}/*"]
      }
    }
  }

  dynamic "statement" {
    for_each = local.express ? [] : [1]

    content {
      sid       = "Objects"
      actions   = each.value
      resources = [local.objects_arn]
    }
  }

  # A directory bucket knows no permissions on objects: a session reads, or it reads and writes,
  # and always the whole bucket.
  dynamic "statement" {
    for_each = local.express ? [1] : []

    content {
      sid       = "Session"
      actions   = ["s3express:CreateSession"]
      resources = [local.bucket_arn]

      dynamic "condition" {
        for_each = each.key == "reader" ? [1] : []

        content {
          test     = "StringEquals"
          variable = "s3express:SessionMode"
          values   = ["ReadOnly"]
        }
      }
    }
  }

  dynamic "statement" {
    for_each = var.kms_key_arn == null ? [] : [1]

    content {
      sid       = "Key"
      actions   = local.key_actions[each.key]
      resources = [var.kms_key_arn]

      condition {
        test     = "StringEquals"
        variable = "kms:ViaService"
        values   = [for service in local.s3_services : "${service}.${local.region}.${data.aws_partition.current.dns_suffix}"]
      }
    }
  }

  dynamic "statement" {
    for_each = var.encryption_key ? [1] : []

    content {
      sid       = "DataKeys"
      actions   = ["kms:Decrypt"]
      resources = local.data_keys_arns
    }
  }
}

resource "aws_iam_policy" "access" {
  for_each = data.aws_iam_policy_document.access

  name        = "${local.bucket_name}-${each.key}"
  description = "s3kv as a ${each.key} of ${local.bucket_name}"
  policy      = each.value.json
  tags        = local.tags
}

# --- roles for EKS ------------------------------------------------------------------------------

data "aws_iam_policy_document" "trust_pod_identity" {
  for_each = var.pod_identities

  statement {
    actions = ["sts:AssumeRole", "sts:TagSession"]

    principals {
      type        = "Service"
      identifiers = ["pods.eks.amazonaws.com"]
    }

    # The association says the same; with it here, no other association can use the role.
    condition {
      test     = "StringEquals"
      variable = "aws:RequestTag/eks-cluster-arn"
      values   = ["arn:${local.partition}:eks:${local.region}:${local.account}:cluster/${each.value.cluster_name}"]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:RequestTag/kubernetes-namespace"
      values   = [each.value.namespace]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:RequestTag/kubernetes-service-account"
      values   = [each.value.service_account]
    }
  }
}

data "aws_iam_policy_document" "trust_irsa" {
  for_each = var.irsa

  statement {
    actions = ["sts:AssumeRoleWithWebIdentity"]

    principals {
      type        = "Federated"
      identifiers = [each.value.oidc_provider_arn]
    }

    condition {
      test     = "StringEquals"
      variable = "${split(":oidc-provider/", each.value.oidc_provider_arn)[1]}:sub"
      values   = ["system:serviceaccount:${each.value.namespace}:${each.value.service_account}"]
    }

    condition {
      test     = "StringEquals"
      variable = "${split(":oidc-provider/", each.value.oidc_provider_arn)[1]}:aud"
      values   = ["sts.amazonaws.com"]
    }
  }
}

locals {
  roles = merge(
    { for name, identity in var.pod_identities : name => {
      trust  = data.aws_iam_policy_document.trust_pod_identity[name].json
      access = identity.access
    } },
    { for name, identity in var.irsa : name => {
      trust  = data.aws_iam_policy_document.trust_irsa[name].json
      access = identity.access
    } },
  )
}

resource "aws_iam_role" "eks" {
  for_each = local.roles

  name                 = "${local.bucket_name}-${each.key}"
  description          = "s3kv as a ${each.value.access} of ${local.bucket_name}"
  assume_role_policy   = each.value.trust
  permissions_boundary = var.permissions_boundary_arn
  tags                 = local.tags
}

resource "aws_iam_role_policy_attachment" "eks" {
  for_each = local.roles

  role       = aws_iam_role.eks[each.key].name
  policy_arn = aws_iam_policy.access[each.value.access].arn
}

resource "aws_eks_pod_identity_association" "this" {
  for_each = var.pod_identities

  cluster_name    = each.value.cluster_name
  namespace       = each.value.namespace
  service_account = each.value.service_account
  role_arn        = aws_iam_role.eks[each.key].arn
  tags            = local.tags
}
